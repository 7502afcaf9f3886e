//! Looks after the authority: files that change, certificates of our own that end, roots that proxies read.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ztunnel::files::read_small;

use crate::ca::{Ca, FolderWatch, write_whole};
use crate::tls::Serving;

/// Looks after the authority and what is signed by it for ourselves.
pub async fn tend(ca: &Arc<Ca>, serving: &Arc<Serving>, root_cert: Option<&Path>) {
    let mut folder = FolderWatch::new(ca.dir());
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut complaint = None;
    let mut warned = None::<Instant>;
    loop {
        tokio::select! {
            _ = look.tick() => folder.listen(),
            // The files of one change follow each other.
            () = folder.changed() => tokio::time::sleep(GATHER).await,
        }
        let (of, ours, path) = (ca.clone(), serving.clone(), root_cert.map(Path::to_owned));
        let looked = tokio::task::spawn_blocking(move || look_after(&of, &ours, path.as_deref())).await;
        let problem = looked.unwrap_or_else(|panic| Some(panic.to_string()));
        match &problem {
            Some(reason) if problem != complaint => {
                tracing::warn!(reason, "the authority's files cannot be used, those before stay in force");
            }
            None if complaint.is_some() => tracing::info!("the authority's files are right again"),
            _ => {}
        }
        complaint = problem;
        let report = ca.report();
        let ends = report.certificates().filter(|(_, cert)| cert.seconds_left < ENDS_SOON.as_secs());
        if warned.is_none_or(|at| at.elapsed() > WARN_AGAIN) {
            for (what, cert) in ends {
                warned = Some(Instant::now());
                tracing::warn!(
                    name = cert.name,
                    until = cert.not_after,
                    "a {what} certificate of the authority ends soon"
                );
            }
        }
    }
}

/// One look; why the files cannot be used, if they cannot.
fn look_after(ca: &Ca, serving: &Serving, root_cert: Option<&Path>) -> Option<String> {
    let changes = ca.refresh();
    if (changes.signer || serving.is_due())
        && let Err(error) = serving.renew()
    {
        tracing::error!(%error, "the serving certificate cannot be renewed");
    }
    if let Some(path) = root_cert
        && let Err(error) = publish_roots(ca, path)
    {
        tracing::warn!(path = %path.display(), %error, "the roots cannot be written for the proxies");
    }
    changes.problem
}

/// Writes the roots for the proxies, if the file does not hold them.
pub fn publish_roots(ca: &Ca, path: &Path) -> io::Result<()> {
    let roots = ca.roots_pem();
    if read_small(path, roots.len()).is_ok_and(|held| held == roots.as_bytes()) {
        return Ok(());
    }
    write_whole(path, roots.as_bytes(), 0o644)
}

/// How often the authority's files are looked at without having heard of a change.
const LOOK: Duration = Duration::from_secs(2);
const GATHER: Duration = Duration::from_millis(200);
const ENDS_SOON: Duration = Duration::from_secs(30 * 86400);
const WARN_AGAIN: Duration = Duration::from_secs(86400);
