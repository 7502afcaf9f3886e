//! The first connection of an identity: with a certificate that has just come, that came before, and that has long been
//! in use. A testbed of its own, with a certificate service that answers when it is told to.

use std::time::{Duration, Instant};

use testbed::{Behaviour, FakeCa, Manner, MeshOptions, Outside, Pod, Server, Shop, StreamExt, wait_for};
use ztunnel::identity::{
    CaClient, CaClientSettings, CertificateAuthority, ControlPlane, RootSource, Trust, TrustSettings,
};

use crate::Cli;
use crate::figures::{Figures, Unit};
use crate::paths::Path;

pub const NAMES: [&str; 4] =
    ["cold_identity_ms", "ca_round_trip_ms", "prefetched_first_connection_ms", "warm_first_connection_ms"];
/// First connections of a round; each needs a pod of its own.
const SAMPLES: usize = 8;
/// For a connection to come to wait in the proxy.
const UNDER_WAY: Duration = Duration::from_millis(100);

/// The cluster.
pub struct Identities {
    _server: Server,
    ca: FakeCa,
    shop: Shop,
    place: Outside,
}

impl Identities {
    pub fn set_up() -> Self {
        let shop = Shop::without_mesh();
        let place = shop.tb.outside("ca");
        let ca = FakeCa::start(&place);
        shop.tb.start_mesh_with(MeshOptions::default().proxy_env("CA_ADDRESS", ca.address()));
        shop.enrol();
        Self { _server: shop.far.serve(8080, Behaviour::Echo), ca, shop, place }
    }

    pub fn round(&self, cli: &Cli, round: u32, figures: &mut Figures) {
        if cli.wants(&["ca_round_trip_ms"]) {
            figures.add(Path::Mesh, "ca_round_trip_ms", Unit::Ms, self.round_trip());
        }
        let mut measure = |name: &'static str, one: &dyn Fn(usize) -> Duration| {
            if cli.wants(&[name]) {
                let mut samples: Vec<Duration> = (0..SAMPLES).map(one).collect();
                samples.sort_unstable();
                figures.add(Path::Mesh, name, Unit::Ms, millis(samples[SAMPLES / 2]));
            }
        };
        measure("cold_identity_ms", &|sample| self.cold(&format!("cold-{round}-{sample}")));
        measure("prefetched_first_connection_ms", &|sample| {
            let name = format!("early-{round}-{sample}");
            self.first(&name, &name)
        });
        measure("warm_first_connection_ms", &|sample| self.first(&format!("warm-{round}-{sample}"), "client"));
    }

    /// From the authority's decision to answer to the first byte for the app.
    fn cold(&self, name: &str) -> Duration {
        self.ca.set(name, Manner::Held);
        let pod = self.start(name, name);
        let took = std::thread::scope(|scope| {
            let asked = scope.spawn(|| {
                self.ask(&pod);
                Instant::now()
            });
            std::thread::sleep(UNDER_WAY);
            assert!(!asked.is_finished(), "{name} was answered without a certificate");
            let answered = Instant::now();
            self.ca.set(name, Manner::Good);
            asked.join().expect("the connection") - answered
        });
        pod.delete();
        took
    }

    /// The first connection of a pod whose identity has its certificate already.
    fn first(&self, name: &str, account: &str) -> Duration {
        let pod = self.start(name, account);
        wait_for("the certificate", || (self.ca.issued(account) > 0).then_some(()));
        std::thread::sleep(UNDER_WAY);
        let start = Instant::now();
        self.ask(&pod);
        let took = start.elapsed();
        pod.delete();
        took
    }

    fn start(&self, name: &str, account: &str) -> Pod {
        let pod = self.shop.tb.pod(&format!("shop/{name}")).service_account(account).start();
        self.shop.mesh().wait_in_mesh(&[&pod]);
        pod
    }

    fn ask(&self, pod: &Pod) {
        let to = self.shop.far_service.at(80);
        pod.connect(to).unwrap_or_else(|e| panic!("{} → {to}: {e}", pod.name())).ask(b"hello");
    }

    /// A certificate from the same service, asked for as a proxy does.
    fn round_trip(&self) -> f64 {
        let control_plane = ControlPlane {
            setting: "CA_ADDRESS",
            address: self.ca.address().parse().expect("the service's own address"),
            roots_setting: "CA_ROOT_CA",
            roots: RootSource::System,
            alternate_name: None,
            token: None,
            cluster_id: String::new(),
            headers: Vec::new(),
        };
        let identity: ztunnel::identity::Identity = self.shop.client.identity().parse().expect("an identity");
        let mut samples = self.place.netns().run(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            let client =
                CaClient::new(control_plane, CaClientSettings::default(), Trust::new(TrustSettings::default()));
            // The first one makes the connection.
            let times = (0..=SAMPLES).map(|_| {
                let start = Instant::now();
                runtime.block_on(client.issue(identity.clone())).unwrap_or_else(|e| panic!("{e}"));
                start.elapsed()
            });
            times.collect::<Vec<_>>().split_off(1)
        });
        samples.sort_unstable();
        millis(samples[SAMPLES / 2])
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
