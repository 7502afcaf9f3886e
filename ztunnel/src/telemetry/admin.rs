//! The pages of the proxy's admin and readiness servers.
//!
//! Must never do anything on GET: what acts is POST.

use std::fmt::Write;

use http::StatusCode;

use super::config_dump::Sources;
use super::http::{Request, Response, Router};
use super::log::{Levels, Logging};
use crate::lifecycle::{Readiness, Shutdown, Watchdog};

/// The admin server's pages: `/`, `/config_dump`, `/logging`, `/quitquitquit`.
pub fn admin_pages(dump: Sources, logging: Logging, shutdown: Shutdown) -> Router {
    let router = dump.page(Router::new());
    let router = router.post("/logging", move |request| levels(&logging, request));
    let router = router.post("/quitquitquit", move |_| {
        shutdown.order("quitquitquit");
        Response::text(StatusCode::OK, "shutting down\n")
    });
    router.get("/", |_| index())
}

/// The readiness server's pages: `/healthz/ready`, and `/healthz/live` for liveness.
pub fn readiness_pages(readiness: Readiness, watchdog: Watchdog) -> Router {
    let router = Router::new().get("/healthz/ready", move |_| match &*readiness.pending_tasks() {
        [] => Response::text(StatusCode::OK, "ready\n"),
        pending => {
            let text = format!("not ready, pending: {}\n", pending.join(", "));
            Response::text(StatusCode::INTERNAL_SERVER_ERROR, text)
        }
    });
    router.get("/healthz/live", move |_| match &*watchdog.stuck() {
        [] => Response::text(StatusCode::OK, "alive\n"),
        stuck => {
            let each = stuck.iter().map(|(name, silence)| format!("{name} ({} s)", silence.as_secs()));
            let text = format!("not alive, stuck: {}\n", each.collect::<Vec<_>>().join(", "));
            Response::text(StatusCode::INTERNAL_SERVER_ERROR, text)
        }
    })
}

/// Sets or shows the log's levels. `reset` comes first where both are given.
fn levels(logging: &Logging, request: &Request) -> Response {
    let levels = match request.query("level").map(|text| Levels::parse(&text)).transpose() {
        Ok(levels) => levels,
        Err(error) => return Response::text(StatusCode::BAD_REQUEST, format!("{error}\n")),
    };
    if let Some((unknown, _)) = request.queries().find(|(key, _)| !matches!(key.as_str(), "level" | "reset")) {
        let text = format!("unknown parameter {unknown:?}: expected level or reset\n");
        return Response::text(StatusCode::BAD_REQUEST, text);
    }
    let reset = request.query("reset").is_some();
    let help = if levels.is_none() && !reset { LEVELS_HELP } else { "" };
    if reset {
        logging.reset_levels();
    }
    if let Some(levels) = levels {
        logging.set_levels(levels);
    }
    let current = logging.levels();
    if help.is_empty() {
        tracing::info!(target: "admin", levels = current, "log levels were set");
    }
    Response::text(StatusCode::OK, format!("current log level is {current}\n{help}"))
}

fn index() -> Response {
    let mut html = String::from("<!DOCTYPE html>\n<title>ztunnel admin</title>\n<h1>ztunnel admin</h1>\n<table>\n");
    for (path, method, text) in PAGES {
        let link = if *method == "GET" { format!("<a href=\"{path}\">{path}</a>") } else { (*path).to_owned() };
        let _ = writeln!(html, "<tr><td>{method}</td><td>{link}</td><td>{text}</td></tr>");
    }
    html.push_str("</table>\n");
    Response::html(html)
}

const PAGES: &[(&str, &str, &str)] = &[
    ("/config_dump", "GET", "what the proxy knows and holds, as JSON"),
    ("/explain", "GET", "what would happen to a connection, and why: ?from=<client>&to=<destination>:<port>"),
    ("/logging", "POST", "log levels: ?level=info,access=debug sets them, ?reset goes back to those of the start"),
    ("/quitquitquit", "POST", "stops the proxy in order: open connections may end until the drain deadline"),
];

const LEVELS_HELP: &str = "\nusage: POST /logging?level=<level>              for all targets\n\
    \u{20}      POST /logging?level=<target>=<level>,...  for single targets, such as level=info,access=debug\n\
    \u{20}      POST /logging?reset                       back to the levels of the start\n\
    levels: trace, debug, info, warn, error, off\n";

#[cfg(test)]
mod tests;
