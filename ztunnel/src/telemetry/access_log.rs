//! The access log: one line for each connection, fields and order of Istio's node proxy, then who ended it and how.
//!
//! Must never cost anything where the level is off.

use std::time::Duration;

use tracing::Level;

use super::flow::{Direction, Failure, Flow, Outcome, Peer, Security};
use super::log::Hush;
use crate::policy::Decision;

/// Debug: the connection is established.
pub(super) fn opened(flow: &Flow) {
    if tracing::enabled!(target: "access", Level::DEBUG) {
        line!(Level::DEBUG, "connection opened", Fields::of(flow), Ending::default());
    }
}

/// Info, or error if it broke: the connection is over. Bytes are seen from the local application.
pub(super) fn complete(flow: &Flow, sent: u64, received: u64, outcome: &Outcome) {
    let ending = || Ending {
        bytes_sent: Some(sent),
        bytes_recv: Some(received),
        duration: Some(milliseconds(flow.started.elapsed())),
        error: outcome.failure.as_ref().map(|failure| &*failure.text),
        flags: outcome.failure.as_ref().map(|failure| failure.flag.as_str()),
        side: Some(outcome.side.as_str()),
        hop: Some(outcome.side.hop(flow.direction)),
        how: Some(outcome.how.as_str()),
        untold: None,
    };
    if outcome.failure.is_some() {
        if tracing::enabled!(target: "access", Level::ERROR) {
            line!(Level::ERROR, "connection complete", Fields::of(flow), ending());
        }
    } else if tracing::enabled!(target: "access", Level::INFO) {
        line!(Level::INFO, "connection complete", Fields::of(flow), ending());
    }
}

/// Warn if it was denied before anything was dialled, else error: the connection was never established. Of those that a
/// limit refused, some lines a second say how many have none: more would be a flood's second harm.
pub(super) fn failed(flow: &Flow, failure: &Failure) {
    let untold = match failure.step {
        "limit" => match LIMIT_HUSH.speak() {
            Some(untold) => Some(untold).filter(|untold| *untold > 0),
            None => return,
        },
        _ => None,
    };
    let ending = || Ending {
        duration: Some(milliseconds(flow.started.elapsed())),
        error: Some(&failure.text),
        flags: Some(failure.flag.as_str()),
        untold,
        ..Ending::default()
    };
    if matches!(failure.step, "source" | "policy") {
        if tracing::enabled!(target: "access", Level::WARN) {
            line!(Level::WARN, "connection failed", Fields::of(flow), ending());
        }
    } else if tracing::enabled!(target: "access", Level::ERROR) {
        line!(Level::ERROR, "connection failed", Fields::of(flow), ending());
    }
}

/// Of an audit or a dry run: what the policies say where that is not enforced. Info where somebody wants to know, debug
/// for a dry run that would change nothing.
pub(super) fn judged(flow: &Flow, decision: &Decision) {
    let changes = decision.dry_run.as_ref().filter(|dry| dry.is_allowed() != decision.verdict.is_allowed());
    if changes.is_some() || !decision.audited.is_empty() {
        if tracing::enabled!(target: "policy", Level::INFO) {
            report!(Level::INFO, flow, decision);
        }
    } else if decision.dry_run.is_some() && tracing::enabled!(target: "policy", Level::DEBUG) {
        report!(Level::DEBUG, flow, decision);
    }
}

/// What a flow says of itself.
struct Fields<'a> {
    flow: &'a Flow,
    src: Names<'a>,
    src_identity: Option<String>,
    dst: Names<'a>,
    dst_identity: Option<String>,
    authority: Option<String>,
    /// Only where it is not what the addresses say.
    attested: Option<&'static str>,
}

#[derive(Default)]
struct Names<'a> {
    workload: Option<&'a str>,
    namespace: Option<&'a str>,
    cluster: Option<&'a str>,
}

#[derive(Default)]
struct Ending<'a> {
    bytes_sent: Option<u64>,
    bytes_recv: Option<u64>,
    duration: Option<String>,
    error: Option<&'a str>,
    flags: Option<&'a str>,
    side: Option<&'a str>,
    hop: Option<&'a str>,
    how: Option<&'a str>,
    /// Lines that were not written before this one.
    untold: Option<u64>,
}

impl<'a> Fields<'a> {
    fn of(flow: &'a Flow) -> Self {
        let is_known = flow.security() != Security::None;
        let outbound = flow.direction == Direction::Outbound;
        Self {
            flow,
            src: Names::of(&flow.source),
            src_identity: flow.source.identity.as_ref().filter(|_| is_known).map(ToString::to_string),
            dst: Names::of(&flow.destination),
            dst_identity: flow.destination.identity.as_ref().filter(|_| is_known && outbound).map(ToString::to_string),
            authority: flow.authority.as_ref().map(ToString::to_string),
            attested: (flow.security() == Security::Attested).then(|| Security::Attested.as_str()),
        }
    }
}

impl<'a> Names<'a> {
    fn of(peer: &'a Peer) -> Self {
        fn known(text: &str) -> Option<&str> {
            (!text.is_empty()).then_some(text)
        }
        match (&peer.workload, &peer.claims) {
            (Some(w), _) => Self {
                workload: known(w.name()),
                namespace: known(&w.common.namespace),
                cluster: known(&w.place.cluster),
            },
            (None, Some(c)) => {
                Self { workload: known(&c.workload), namespace: known(&c.namespace), cluster: known(&c.cluster) }
            }
            (None, None) => Self::default(),
        }
    }
}

fn milliseconds(duration: Duration) -> String {
    format!("{}ms", duration.as_millis())
}

/// One event; the level has to be a constant of its place in the code.
macro_rules! line {
    ($level:expr, $text:literal, $fields:expr, $ending:expr) => {{
        let (fields, ending) = ($fields, $ending);
        tracing::event!(
            target: "access",
            $level,
            src.addr = %fields.flow.src,
            src.workload = fields.src.workload,
            src.namespace = fields.src.namespace,
            src.identity = fields.src_identity.as_deref(),
            src.cluster = fields.src.cluster,
            dst.addr = %fields.flow.dst,
            dst.hbone_addr = fields.authority.as_ref().map(tracing::field::display),
            dst.service = fields.flow.service.as_deref().map(|service| &*service.hostname),
            dst.workload = fields.dst.workload,
            dst.namespace = fields.dst.namespace,
            dst.identity = fields.dst_identity.as_deref(),
            dst.cluster = fields.dst.cluster,
            direction = fields.flow.direction.as_str(),
            security = fields.attested,
            bytes_sent = ending.bytes_sent,
            bytes_recv = ending.bytes_recv,
            duration = ending.duration.as_deref(),
            error = ending.error,
            response_flags = ending.flags,
            closed.by = ending.side,
            closed.hop = ending.hop,
            closed.how = ending.how,
            untold = ending.untold,
            $text
        );
    }};
}

/// The same for what policies say.
macro_rules! report {
    ($level:expr, $flow:expr, $decision:expr) => {{
        let (flow, decision) = ($flow, $decision);
        let fields = Fields::of(flow);
        let audited: Vec<_> = decision.audited.iter().take(MAX_AUDITS).map(ToString::to_string).collect();
        tracing::event!(
            target: "policy",
            $level,
            src.addr = %flow.src,
            src.workload = fields.src.workload,
            src.namespace = fields.src.namespace,
            src.identity = fields.src_identity.as_deref(),
            dst.addr = %flow.dst,
            dst.workload = fields.dst.workload,
            dst.namespace = fields.dst.namespace,
            verdict = decision.verdict.to_string(),
            dry_run = decision.dry_run.as_ref().map(ToString::to_string),
            audited = (!audited.is_empty()).then(|| audited.join(", ")),
            audits = (audited.len() < decision.audited.len()).then_some(decision.audited.len()),
            "connection judged"
        );
    }};
}

use {line, report};

static LIMIT_HUSH: Hush = Hush::new(10);
/// Audits that are named in a line.
const MAX_AUDITS: usize = 8;
