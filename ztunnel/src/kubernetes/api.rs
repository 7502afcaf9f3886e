//! Requests to the API server.
//!
//! Must never wait without limit, nor write what it answers (it may be a secret) to the log.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use http::{Method, Request, header};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::WatchEvent;
use serde::Deserialize;
use serde_json::Value;

/// The API server of one cluster. Cheap to clone.
#[derive(Clone)]
pub struct Api {
    client: kube::Client,
}

/// Why there is nobody to ask.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("--kubeconfig {}: {reason}", path.display())]
    Kubeconfig { path: PathBuf, reason: String },
    #[error("--source kubernetes: this is no pod of a cluster ({0}): expected --kubeconfig elsewhere")]
    NoPod(String),
    #[error("the API server at {address}: {reason}")]
    Address { address: SocketAddr, reason: String },
}

/// Why a request was not answered as it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    #[error("the API server cannot be reached: {0}")]
    Away(String),
    #[error("the API server has not answered within {0:?}")]
    Slow(Duration),
    #[error("the API server answers {code}: {message}")]
    Refused { code: u16, message: String },
    #[error("the API server's answer cannot be read: {0}")]
    Unreadable(String),
}

/// Part of a list.
#[derive(Debug, Deserialize)]
pub(super) struct Page {
    #[serde(default)]
    pub items: Vec<Value>,
    pub metadata: PageMeta,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PageMeta {
    /// From where on to watch.
    #[serde(default)]
    pub resource_version: String,
    /// Where the next page begins; empty at the end.
    #[serde(default)]
    pub r#continue: String,
}

impl Api {
    /// With a kubeconfig's current context, else with the account of the pod that this runs in.
    pub async fn connect(kubeconfig: Option<&Path>) -> Result<Self, ConnectError> {
        let mut config = match kubeconfig {
            Some(path) => {
                let fail = |reason: String| ConnectError::Kubeconfig { path: path.to_owned(), reason };
                let file = Kubeconfig::read_from(path).map_err(|e| fail(with_causes(&e)))?;
                let options = KubeConfigOptions::default();
                kube::Config::from_custom_kubeconfig(file, &options).await.map_err(|e| fail(with_causes(&e)))?
            }
            None => kube::Config::incluster().map_err(|e| ConnectError::NoPod(with_causes(&e)))?,
        };
        config.connect_timeout = Some(CONNECT);
        // Whoever asks knows better how long to wait until he asks again.
        config.default_retry = false;
        let client = kube::Client::try_from(config).map_err(|e| match kubeconfig {
            Some(path) => ConnectError::Kubeconfig { path: path.to_owned(), reason: with_causes(&e) },
            None => ConnectError::NoPod(with_causes(&e)),
        })?;
        Ok(Self { client })
    }

    /// One that speaks without TLS and lets everybody in, as tests have it.
    pub fn unprotected(address: SocketAddr) -> Result<Self, ConnectError> {
        let fail = |reason: String| ConnectError::Address { address, reason };
        let url = format!("http://{address}").parse().map_err(|e: http::uri::InvalidUri| fail(e.to_string()))?;
        let mut config = kube::Config::new(url);
        config.default_retry = false;
        Ok(Self { client: kube::Client::try_from(config).map_err(|e| fail(with_causes(&e)))? })
    }

    /// What a path holds, as text.
    pub async fn text(&self, path: &str) -> Result<String, ApiError> {
        self.send(Method::GET, path, JSON, Vec::new()).await
    }

    /// What a path holds; nothing if there is no such path.
    pub async fn find(&self, path: &str) -> Result<Option<Value>, ApiError> {
        match self.text(path).await {
            Ok(text) => parse(&text).map(Some),
            Err(ApiError::Refused { code: 404, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates an object under a path; what became of it.
    pub async fn create(&self, path: &str, object: &Value) -> Result<Value, ApiError> {
        parse(&self.send(Method::POST, path, JSON, object.to_string().into_bytes()).await?)
    }

    /// Puts an object in the place of the one that it was read as.
    pub async fn replace(&self, path: &str, object: &Value) -> Result<Value, ApiError> {
        parse(&self.send(Method::PUT, path, JSON, object.to_string().into_bytes()).await?)
    }

    /// Changes some fields of an object.
    pub async fn merge(&self, path: &str, fields: &Value) -> Result<Value, ApiError> {
        parse(&self.send(Method::PATCH, path, JSON, fields.to_string().into_bytes()).await?)
    }

    /// All objects of a list; `query` is encoded and begins with `&`.
    pub async fn list(&self, path: &str, query: &str) -> Result<Vec<Value>, ApiError> {
        let (mut items, mut from) = (Vec::new(), String::new());
        loop {
            let page = self.page(path, &format!("limit=500{from}{query}"), JSON).await?;
            items.extend(page.items);
            if page.metadata.r#continue.is_empty() {
                return Ok(items);
            }
            from = format!("&continue={}", encode(&page.metadata.r#continue));
        }
    }

    /// One page of a list; `query` is encoded.
    pub(super) async fn page(&self, path: &str, query: &str, accept: &'static str) -> Result<Page, ApiError> {
        parse(&self.send(Method::GET, &format!("{path}?{query}"), accept, Vec::new()).await?)
    }

    /// Changes, as they come; ends when the server says so.
    pub(super) async fn watch(
        &self,
        path: &str,
        query: &str,
        accept: &'static str,
    ) -> Result<impl Stream<Item = Result<WatchEvent<Value>, ApiError>> + use<>, ApiError> {
        let request = request(Method::GET, &format!("{path}?{query}"), accept, Vec::new())?;
        let events = tokio::time::timeout(ANSWER, self.client.request_events::<Value>(request)).await;
        let events = events.map_err(|_| ApiError::Slow(ANSWER))??;
        Ok(StreamExt::map(events, |event: Result<_, kube::Error>| event.map_err(ApiError::from)))
    }

    async fn send(&self, method: Method, path: &str, accept: &'static str, body: Vec<u8>) -> Result<String, ApiError> {
        let request = request(method, path, accept, body)?;
        let answer = tokio::time::timeout(ANSWER, self.client.request_text(request)).await;
        Ok(answer.map_err(|_| ApiError::Slow(ANSWER))??)
    }
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Api")
    }
}

impl ApiError {
    /// In few words, none of which is the server's or the system's.
    pub fn brief(&self) -> String {
        match self {
            Self::Away(_) => "the API server cannot be reached".into(),
            Self::Slow(_) => "the API server does not answer".into(),
            Self::Refused { code, .. } => format!("the API server answers {code}"),
            Self::Unreadable(_) => "the API server's answer cannot be read".into(),
        }
    }

    /// For metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Away(_) => "away",
            Self::Slow(_) => "slow",
            Self::Refused { code: 401 | 403, .. } => "forbidden",
            Self::Refused { code: 410, .. } => "expired",
            Self::Refused { .. } => "refused",
            Self::Unreadable(_) => "unreadable",
        }
    }
}

impl From<kube::Error> for ApiError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::Refused { code: status.code, message: status.message.clone() },
            kube::Error::SerdeError(error) => Self::Unreadable(format!("{:?} error", error.classify())),
            kube::Error::FromUtf8(_) => Self::Unreadable("it is no UTF-8".into()),
            error => Self::Away(with_causes(&error)),
        }
    }
}

fn request(method: Method, path: &str, accept: &'static str, body: Vec<u8>) -> Result<Request<Vec<u8>>, ApiError> {
    let content = if method == Method::PATCH { MERGE_PATCH } else { JSON };
    let builder = Request::builder().method(method).uri(path).header(header::ACCEPT, accept);
    let request = builder.header(header::CONTENT_TYPE, content).body(body);
    request.map_err(|e| ApiError::Unreadable(format!("{path} is no path: {e}")))
}

fn parse<T: for<'de> Deserialize<'de>>(text: &str) -> Result<T, ApiError> {
    // Not the error's own text, which may hold some of what was read.
    serde_json::from_str(text)
        .map_err(|e| ApiError::Unreadable(format!("{:?} error at byte {} of {}", e.classify(), e.column(), text.len())))
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let more = next.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = next.source();
    }
    text
}

/// A query's value, encoded.
pub(super) fn encode(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'~');
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

pub(super) const JSON: &str = "application/json";
const MERGE_PATCH: &str = "application/merge-patch+json";
/// Names, labels and annotations without the rest.
pub(super) const ITEMS_METADATA: &str =
    "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=1,application/json";
pub(super) const EVENTS_METADATA: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=1,application/json";

const CONNECT: Duration = Duration::from_secs(5);
/// From a request to its whole answer, or to a watch's head.
const ANSWER: Duration = Duration::from_secs(30);
