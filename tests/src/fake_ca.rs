//! A certificate service that is none of ours and does what a test tells it to: denies, hangs, answers nonsense, lets
//! certificates live for seconds, changes its roots.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use prost_types::value::Kind;
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tonic::{Request, Response, Status};
use ztunnel::proto::citadel::istio_certificate_service_server::{
    IstioCertificateService, IstioCertificateServiceServer,
};
use ztunnel::proto::citadel::{IstioCertificateRequest, IstioCertificateResponse};

use crate::certs::Authority;
use crate::grpc::serve_grpc;
use crate::testbed::Outside;

const PORT: u16 = 15013;

/// The service, on a machine of the testbed. It ends with this value.
#[derive(Debug)]
pub struct FakeCa {
    state: Arc<Mutex<State>>,
    address: String,
    // Ends the service.
    _runtime: Runtime,
}

/// How the service answers for a service account.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Manner {
    #[default]
    Good,
    /// PERMISSION_DENIED.
    Denies,
    /// Never an answer.
    Hangs,
    /// No answer until another manner is set.
    Held,
    /// A good one that began an hour ago.
    Backdated,
    /// A certificate that is none.
    Garbage,
    /// An answer without any part.
    Nothing,
    /// A leaf without roots.
    OnlyLeaf,
    /// A leaf for another identity.
    OtherIdentity,
    /// A leaf for another key.
    OtherKey,
    /// A leaf that ended before.
    Expired,
    /// A leaf that begins later.
    NotYetValid,
    /// A leaf that the roots beside it have not signed.
    OtherRoot,
}

#[derive(Debug)]
struct State {
    /// Told about each manner that is set.
    news: Arc<Notify>,
    signer: Arc<Authority>,
    /// Handed out; the signer's own is not implied.
    roots: Vec<String>,
    life: Duration,
    manners: HashMap<String, Manner>,
    /// Certificates by service account.
    issued: HashMap<String, usize>,
}

impl FakeCa {
    /// Starts it. Its certificates live for an hour unless told otherwise.
    pub fn start(place: &Outside) -> Self {
        let signer = Arc::new(Authority::root("fake root 1"));
        let roots = vec![signer.root_pem.clone()];
        let state = State {
            news: Arc::default(),
            signer,
            roots,
            life: Duration::from_secs(3600),
            manners: HashMap::new(),
            issued: HashMap::new(),
        };
        let state = Arc::new(Mutex::new(state));
        let service = IstioCertificateServiceServer::new(Service(state.clone()));
        let runtime = serve_grpc(place, PORT, tonic::transport::Server::builder().add_service(service));
        Self { state, address: format!("http://{}:{PORT}", place.ip4()), _runtime: runtime }
    }

    /// For the proxies' setting CA_ADDRESS.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// From now on, for this service account.
    pub fn set(&self, account: &str, manner: Manner) {
        let mut state = self.state();
        state.manners.insert(account.to_owned(), manner);
        state.news.notify_waiters();
    }

    /// From now on certificates live so long.
    pub fn set_life(&self, life: Duration) {
        self.state().life = life;
    }

    /// What signs from now on.
    pub fn set_signer(&self, signer: &Arc<Authority>) {
        self.state().signer = signer.clone();
    }

    /// The roots that come with certificates from now on.
    pub fn set_roots(&self, roots: &[&Authority]) {
        self.state().roots = roots.iter().map(|root| root.root_pem.clone()).collect();
    }

    /// What signs now.
    pub fn signer(&self) -> Arc<Authority> {
        self.state().signer.clone()
    }

    /// How many certificates a service account has been given.
    pub fn issued(&self, account: &str) -> usize {
        self.state().issued.get(account).copied().unwrap_or(0)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

struct Service(Arc<Mutex<State>>);

#[tonic::async_trait]
impl IstioCertificateService for Service {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        let request = request.into_inner();
        let wanted = request.metadata.as_ref().and_then(|m| m.fields.get("ImpersonatedIdentity")?.kind.clone());
        let Some(Kind::StringValue(wanted)) = wanted else {
            return Err(Status::invalid_argument("no identity is asked for"));
        };
        let account = wanted.rsplit('/').next().unwrap_or_default().to_owned();
        let manner = manner_of(&self.0, &account).await;
        match manner {
            Manner::Denies => return Err(Status::permission_denied("the fake authority denies it")),
            Manner::Hangs => std::future::pending().await,
            _ => {}
        }
        let mut state = self.0.lock().unwrap();
        let now = SystemTime::now();
        let (mut begin, mut end) = (now - Duration::from_secs(120), now + state.life);
        let minute = Duration::from_secs(60);
        match manner {
            Manner::Expired => end = now - minute,
            Manner::Backdated => begin = now - 60 * minute,
            Manner::NotYetValid => (begin, end) = (now + 10 * minute, now + 20 * minute),
            _ => {}
        }
        let named = match manner {
            Manner::OtherIdentity => wanted.replace(&account, "somebody-else"),
            _ => wanted,
        };
        let leaf = match manner {
            Manner::OtherKey => state.signer.sign_other_key(&named, begin, end),
            _ => state.signer.sign_request(&request.csr, &named, begin, end),
        };
        let roots = match manner {
            Manner::OtherRoot => Authority::root("a root of nobody").root_pem,
            _ => state.roots.concat(),
        };
        let cert_chain = match manner {
            Manner::Nothing => vec![],
            Manner::OnlyLeaf => vec![leaf],
            Manner::Garbage => vec!["-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".to_owned(), roots],
            _ => vec![leaf, roots],
        };
        if matches!(manner, Manner::Good | Manner::Backdated) {
            *state.issued.entry(account).or_default() += 1;
        }
        Ok(Response::new(IstioCertificateResponse { cert_chain }))
    }
}

/// How to answer for an account; waits while that is held.
async fn manner_of(state: &Mutex<State>, account: &str) -> Manner {
    let news = state.lock().unwrap().news.clone();
    loop {
        // Before the look: what is set after it is told.
        let changed = news.notified();
        let manner = state.lock().unwrap().manners.get(account).copied().unwrap_or_default();
        if manner != Manner::Held {
            return manner;
        }
        changed.await;
    }
}
