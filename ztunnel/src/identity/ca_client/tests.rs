use std::net::SocketAddr;
use std::path::PathBuf;

use tokio::net::TcpListener;
use tonic::{Request, Response, Status};

use super::*;
use crate::identity::testing::{Leaf, TestCa, serve_tls};
use crate::identity::{RootSource, TokenSource, TrustSettings};
use crate::proto::citadel::IstioCertificateResponse;
use crate::proto::citadel::istio_certificate_service_server::{IstioCertificateService, IstioCertificateServiceServer};

/// How the service misbehaves.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Manner {
    Good,
    Denies,
    Hangs,
    OnlyLeaf,
    NotMadeOut,
    OtherIdentity,
    Garbage,
    Expired,
    NotYetValid,
    OtherKey,
    OtherRoot,
    EndedRoot,
}

/// Token, cluster and request of each call.
type Seen = Arc<Mutex<Vec<(Option<String>, Option<String>, IstioCertificateRequest)>>>;

struct Service {
    ca: TestCa,
    manner: Arc<Mutex<Manner>>,
    seen: Seen,
}

#[tonic::async_trait]
impl IstioCertificateService for Service {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        let header = |name| request.metadata().get(name).map(|v| v.to_str().unwrap().to_owned());
        let (token, cluster) = (header("authorization"), header("clusterid"));
        let request = request.into_inner();
        self.seen.lock().unwrap().push((token, cluster, request.clone()));
        let fields = &request.metadata.as_ref().unwrap().fields;
        let Some(Kind::StringValue(text)) = &fields["ImpersonatedIdentity"].kind else { panic!("no text") };
        let identity: Identity = text.parse().unwrap();
        let manner = *self.manner.lock().unwrap();
        let mut leaf = Leaf::of(&identity).lives(Duration::from_secs(request.validity_duration as u64));
        match manner {
            Manner::Denies => {
                return Err(Status::unauthenticated("request impersonation authentication failure"));
            }
            Manner::NotMadeOut => return Err(Status::unauthenticated("request authenticate failure")),
            Manner::Hangs => std::future::pending().await,
            Manner::OtherIdentity => leaf.names = vec!["spiffe://cluster.local/ns/shop/sa/other".into()],
            Manner::Expired => leaf.not_after = leaf.not_before + Duration::from_secs(1),
            Manner::NotYetValid => leaf.not_before = leaf.not_after - Duration::from_secs(1),
            Manner::OtherKey => {
                let other = PrivateKey::generate().unwrap().certificate_request(&identity).unwrap();
                let cert_chain = vec![self.ca.sign_request(&other, &leaf), self.ca.root_pem()];
                return Ok(Response::new(IstioCertificateResponse { cert_chain }));
            }
            Manner::EndedRoot => {
                let ended = TestCa::ending("ended", std::time::SystemTime::now() - Duration::from_secs(60));
                let cert_chain = vec![ended.sign_request(&request.csr, &leaf), ended.root_pem()];
                return Ok(Response::new(IstioCertificateResponse { cert_chain }));
            }
            Manner::Good | Manner::OtherRoot | Manner::OnlyLeaf | Manner::Garbage => {}
        }
        let mut cert_chain = vec![self.ca.sign_request(&request.csr, &leaf), self.ca.root_pem()];
        match manner {
            Manner::OnlyLeaf => cert_chain.truncate(1),
            Manner::OtherRoot => cert_chain[1] = TestCa::new("other").root_pem(),
            Manner::Garbage => cert_chain[0] = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".into(),
            _ => {}
        }
        Ok(Response::new(IstioCertificateResponse { cert_chain }))
    }
}

struct Rig {
    address: SocketAddr,
    manner: Arc<Mutex<Manner>>,
    seen: Seen,
    server_root: String,
    dir: PathBuf,
}

impl Rig {
    /// A certificate service on TLS whose own certificate is for `server_name`.
    async fn start(name: &str, server_name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("understory-ca-client-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let server_ca = TestCa::new("control plane");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let streams = serve_tls(listener, &server_ca, server_name);
        let (manner, seen) = (Arc::new(Mutex::new(Manner::Good)), Arc::default());
        let service = Service { ca: TestCa::new("mesh"), manner: manner.clone(), seen: Arc::clone(&seen) };
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(IstioCertificateServiceServer::new(service))
                .serve_with_incoming(streams),
        );
        std::fs::write(dir.join("root.pem"), server_ca.root_pem()).unwrap();
        std::fs::write(dir.join("token"), "first\n").unwrap();
        Self { address, manner, seen, server_root: server_ca.root_pem(), dir }
    }

    fn control_plane(&self) -> ControlPlane {
        ControlPlane {
            setting: "CA_ADDRESS",
            roots_setting: "CA_ROOT_CA",
            address: format!("https://{}", self.address).parse().unwrap(),
            roots: RootSource::File(self.dir.join("root.pem")),
            alternate_name: None,
            token: Some(TokenSource::File(self.dir.join("token"))),
            cluster_id: "east".into(),
            headers: vec![("X-Extra".into(), "1".into())],
        }
    }

    fn client(&self, control_plane: ControlPlane) -> CaClient {
        let settings = CaClientSettings {
            lifetime: Duration::from_secs(600),
            call_timeout: Duration::from_secs(1),
            timings: LinkTimings::default(),
        };
        CaClient::new(control_plane, settings, Trust::new(TrustSettings::default()))
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn cart() -> Identity {
    "spiffe://cluster.local/ns/shop/sa/cart".parse().unwrap()
}

#[tokio::test]
async fn a_certificate_is_fetched_and_token_and_roots_are_read_anew() {
    let rig = Rig::start("fetch", "127.0.0.1").await;
    let client = rig.client(rig.control_plane());
    let certificate = client.issue(cart()).await.unwrap();
    assert_eq!(certificate.identity(), &cart());
    std::fs::write(rig.dir.join("token"), "second").unwrap();
    client.issue(cart()).await.unwrap();
    {
        let seen = rig.seen.lock().unwrap();
        assert_eq!(seen[0].0.as_deref(), Some("Bearer first"));
        assert_eq!(seen[1].0.as_deref(), Some("Bearer second"));
        assert_eq!(seen[0].1.as_deref(), Some("east"));
        assert_eq!(seen[0].2.validity_duration, 600);
        assert_ne!(seen[0].2.csr, seen[1].2.csr, "each request has its own key");
    }

    // An unreadable file changes nothing; a changed one takes effect with the next call.
    std::fs::write(rig.dir.join("root.pem"), "").unwrap();
    client.issue(cart()).await.unwrap();
    std::fs::write(rig.dir.join("root.pem"), TestCa::new("stranger").root_pem()).unwrap();
    let error = client.issue(cart()).await.unwrap_err().to_string();
    assert!(error.contains("TLS with") && error.contains("sa/cart"), "{error}");
    std::fs::write(rig.dir.join("root.pem"), format!("{}{}", TestCa::new("x").root_pem(), rig.server_root)).unwrap();
    client.issue(cart()).await.unwrap();
}

#[tokio::test]
async fn every_bad_answer_is_refused_with_identity_authority_and_reason() {
    let rig = Rig::start("bad", "127.0.0.1").await;
    let client = rig.client(rig.control_plane());
    for (manner, reason) in [
        (Manner::Denies, "impersonation authentication failure"),
        (Manner::Hangs, "no answer within 1s"),
        (Manner::OnlyLeaf, "leaf and the trust roots are needed"),
        (Manner::NotMadeOut, "request authenticate failure"),
        (Manner::OtherIdentity, "the leaf is for spiffe://cluster.local/ns/shop/sa/other"),
        (Manner::Garbage, "certificate number 1 in it is broken"),
        (Manner::Expired, "is a clock wrong?"),
        (Manner::NotYetValid, "is a clock wrong?"),
        (Manner::OtherKey, "the leaf is not for our key"),
        (Manner::OtherRoot, "does not lead to the roots that came with it"),
        (Manner::EndedRoot, "leads to the root CN=ended, which ended at"),
    ] {
        *rig.manner.lock().unwrap() = manner;
        let error = client.issue(cart()).await.unwrap_err();
        assert_eq!(error.is_denial(), manner == Manner::Denies, "{error}");
        let error = error.to_string();
        for part in [reason, "spiffe://cluster.local/ns/shop/sa/cart", &format!("https://{}", rig.address)] {
            assert!(error.contains(part), "{manner:?}: {part:?} in {error:?}");
        }
    }
    *rig.manner.lock().unwrap() = Manner::Good;
    client.issue(cart()).await.unwrap();
}

#[tokio::test]
async fn a_link_that_cannot_be_made_says_which_step_failed() {
    let rig = Rig::start("steps", "127.0.0.1").await;
    let good = rig.control_plane();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closed = listener.local_addr().unwrap();
    drop(listener);
    for (control_plane, reason) in [
        (ControlPlane { roots: RootSource::File("/missing/root.pem".into()), ..good.clone() }, "/missing/root.pem"),
        (ControlPlane { roots: RootSource::Pem("no pem".into()), ..good.clone() }, "no certificate in it"),
        (ControlPlane { token: Some(TokenSource::File("/missing/token".into())), ..good.clone() }, "/missing/token"),
        (ControlPlane { address: format!("https://{closed}").parse().unwrap(), ..good.clone() }, "cannot connect"),
        (
            ControlPlane { address: "https://no-such-host.invalid:15012".parse().unwrap(), ..good.clone() },
            "cannot resolve no-such-host.invalid",
        ),
        (ControlPlane { roots: RootSource::Pem(TestCa::new("x").root_pem()), ..good.clone() }, "TLS with"),
    ] {
        let error = rig.client(control_plane).issue(cart()).await.unwrap_err().to_string();
        assert!(error.contains(reason), "{reason:?} in {error:?}");
    }
}

#[tokio::test]
async fn the_server_may_carry_the_alternate_name() {
    let rig = Rig::start("alternate", "control.example").await;
    let mut control_plane = rig.control_plane();
    let error = rig.client(control_plane.clone()).issue(cart()).await.unwrap_err().to_string();
    assert!(error.contains("TLS with"), "{error}");
    control_plane.alternate_name = Some("control.example".into());
    rig.client(control_plane).issue(cart()).await.unwrap();
}
