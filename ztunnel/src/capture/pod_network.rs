//! What a pod's namespace needs so that the proxy can speak to its applications with the client's own address:
//! replies to marked connections go to the local proxy (one rule and one local route for each family), and three
//! sysctls.
//!
//! Must never change anything that it cannot put back, nor touch another namespace than the pod's.

use std::fmt;
use std::io;
use std::net::IpAddr;

use futures_util::TryStreamExt;
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::route::{RouteAttribute, RouteHeader, RouteMessage, RouteScope, RouteType};
use rtnetlink::packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rtnetlink::packet_route::{AddressFamily, rule::RuleHeader};
use rtnetlink::{Handle, IpVersion};
use serde::{Deserialize, Serialize};

use super::netns::Netns;

/// `SO_MARK` of the sockets with which the proxy reaches a pod's applications.
pub const MARK: u32 = 0x539;
/// Routing table with the local default route.
pub const TABLE: u8 = 100;
/// Priority of the rule that sends marked packets there: just before the main table's.
pub const PRIORITY: u32 = 32764;

/// Which families a pod has addresses of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Families {
    pub v4: bool,
    pub v6: bool,
}

/// What the namespace was like before, and so what [`remove`] brings back. Read before the first [`install`], and
/// kept by the caller, also over a restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Before {
    pub families: Families,
    /// Sysctls below `/proc/sys/net`, with their former values.
    pub sysctls: Vec<(String, String)>,
}

/// A thing that should be in the namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    Rule(Family),
    Route(Family),
    Sysctl(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

#[derive(Debug, thiserror::Error)]
pub enum PodNetworkError {
    #[error("cannot enter the pod's network namespace: {0}")]
    Enter(#[source] io::Error),
    #[error("cannot {step} {part} in the pod: {source}")]
    Part { step: &'static str, part: Part, source: io::Error },
    #[error("cannot list the {what} of the pod: {source}")]
    List { what: &'static str, source: io::Error },
}

impl Families {
    pub fn of(addresses: &[IpAddr]) -> Families {
        Families { v4: addresses.iter().any(IpAddr::is_ipv4), v6: addresses.iter().any(IpAddr::is_ipv6) }
    }

    fn list(self) -> impl Iterator<Item = Family> {
        [self.v4.then_some(Family::V4), self.v6.then_some(Family::V6)].into_iter().flatten()
    }

    fn sysctls(self) -> impl Iterator<Item = &'static str> {
        let of = [(true, TCP_FWMARK_ACCEPT), (true, TCP_TW_REUSE), (self.v4, REFLECT_V4), (self.v6, REFLECT_V6)];
        of.into_iter().filter_map(|(wanted, name)| wanted.then_some(name))
    }
}

impl Before {
    /// Reads what [`install`] is going to change.
    pub fn read(netns: &Netns, families: Families) -> Result<Before, PodNetworkError> {
        let sysctls = families.sysctls().map(|name| Ok((name.to_owned(), read_sysctl(netns, name)?)));
        Ok(Before { families, sysctls: sysctls.collect::<Result<_, PodNetworkError>>()? })
    }

    /// Takes over what was read earlier, before an installation that is there now.
    pub fn keep(&mut self, earlier: &Before) {
        for (name, former) in &earlier.sysctls {
            match self.sysctls.iter_mut().find(|(other, _)| other == name) {
                Some((_, value)) => value.clone_from(former),
                None => self.sysctls.push((name.clone(), former.clone())),
            }
        }
        self.families.v4 |= earlier.families.v4;
        self.families.v6 |= earlier.families.v6;
    }
}

/// Puts in place whatever is not there yet.
pub async fn install(netns: &Netns, before: &Before) -> Result<(), PodNetworkError> {
    for (name, _) in &before.sysctls {
        if read_sysctl(netns, name)? != WANTED {
            write_sysctl(netns, name, WANTED)?;
        }
    }
    let netlink = Netlink::open(netns)?;
    for family in before.families.list() {
        let failed = |part| move |source| PodNetworkError::Part { step: "add", part, source };
        // The route first: a rule without it would send marked packets nowhere.
        let mut add = netlink.handle.route().add(route(family));
        *add.message_mut() = route(family);
        exists_is_fine(add.execute().await).map_err(failed(Part::Route(family)))?;
        let mut add = netlink.handle.rule().add();
        *add.message_mut() = rule(family);
        exists_is_fine(add.execute().await).map_err(failed(Part::Rule(family)))?;
    }
    Ok(())
}

/// What should be there and is not.
pub async fn missing(netns: &Netns, families: Families) -> Result<Vec<Part>, PodNetworkError> {
    let mut missing = Vec::new();
    for name in families.sysctls() {
        if read_sysctl(netns, name)? != WANTED {
            missing.push(Part::Sysctl(name.to_owned()));
        }
    }
    let netlink = Netlink::open(netns)?;
    for family in families.list() {
        if !netlink.has_rule(family).await? {
            missing.push(Part::Rule(family));
        }
        if !netlink.has_route(family).await? {
            missing.push(Part::Route(family));
        }
    }
    Ok(missing)
}

/// Takes away what [`install`] put there. What is already gone, or was changed by somebody else, is left alone.
pub async fn remove(netns: &Netns, before: &Before) -> Result<(), PodNetworkError> {
    let netlink = Netlink::open(netns)?;
    for family in before.families.list() {
        let failed = |part| move |source| PodNetworkError::Part { step: "remove", part, source };
        absence_is_fine(netlink.handle.rule().del(rule(family)).execute().await).map_err(failed(Part::Rule(family)))?;
        absence_is_fine(netlink.handle.route().del(route(family)).execute().await)
            .map_err(failed(Part::Route(family)))?;
    }
    for (name, former) in &before.sysctls {
        if former != WANTED && read_sysctl(netns, name)? == WANTED {
            write_sysctl(netns, name, former)?;
        }
    }
    Ok(())
}

/// The addresses of the namespace's interfaces, loopback's and link-local ones too.
pub async fn addresses(netns: &Netns) -> Result<Vec<IpAddr>, PodNetworkError> {
    let netlink = Netlink::open(netns)?;
    let messages: Vec<_> = netlink
        .handle
        .address()
        .get()
        .execute()
        .try_collect()
        .await
        .map_err(|error| PodNetworkError::List { what: "addresses", source: as_io(error) })?;
    let own = messages.iter().flat_map(|message| &message.attributes).filter_map(|attribute| match attribute {
        AddressAttribute::Address(ip) | AddressAttribute::Local(ip) => Some(*ip),
        _ => None,
    });
    Ok(own.collect())
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        })
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Part::Rule(family) => write!(f, "the {family} rule for mark {MARK:#x}"),
            Part::Route(family) => write!(f, "the local {family} route of table {TABLE}"),
            Part::Sysctl(name) => write!(f, "sysctl net/{name}"),
        }
    }
}

/// A netlink socket inside the namespace, and the task that serves it.
struct Netlink {
    handle: Handle,
    task: tokio::task::JoinHandle<()>,
}

impl Netlink {
    fn open(netns: &Netns) -> Result<Netlink, PodNetworkError> {
        let (connection, handle, _) =
            netns.run(rtnetlink::new_connection).and_then(|opened| opened).map_err(PodNetworkError::Enter)?;
        Ok(Netlink { handle, task: tokio::spawn(connection) })
    }

    async fn has_rule(&self, family: Family) -> Result<bool, PodNetworkError> {
        let rules = self.handle.rule().get(family.into()).execute();
        let rules: Vec<RuleMessage> = rules
            .try_collect()
            .await
            .map_err(|error| PodNetworkError::List { what: "routing rules", source: as_io(error) })?;
        Ok(rules.iter().any(|rule| {
            rule.header.table == TABLE
                && rule.header.action == RuleAction::ToTable
                && rule.attributes.contains(&RuleAttribute::FwMark(MARK))
                && rule.attributes.contains(&RuleAttribute::Priority(PRIORITY))
        }))
    }

    async fn has_route(&self, family: Family) -> Result<bool, PodNetworkError> {
        let mut which = RouteMessage::default();
        which.header.address_family = family.into();
        let routes = self.handle.route().get(which).execute();
        let routes: Vec<RouteMessage> = routes
            .try_collect()
            .await
            .map_err(|error| PodNetworkError::List { what: "routes", source: as_io(error) })?;
        Ok(routes.iter().any(|route| {
            route.header.table == TABLE
                && route.header.kind == RouteType::Local
                && route.header.destination_prefix_length == 0
                && route.attributes.contains(&RouteAttribute::Oif(LOOPBACK))
        }))
    }
}

impl Drop for Netlink {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl From<Family> for AddressFamily {
    fn from(family: Family) -> AddressFamily {
        match family {
            Family::V4 => AddressFamily::Inet,
            Family::V6 => AddressFamily::Inet6,
        }
    }
}

impl From<Family> for IpVersion {
    fn from(family: Family) -> IpVersion {
        match family {
            Family::V4 => IpVersion::V4,
            Family::V6 => IpVersion::V6,
        }
    }
}

fn rule(family: Family) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header =
        RuleHeader { family: family.into(), table: TABLE, action: RuleAction::ToTable, ..RuleHeader::default() };
    message.attributes = vec![RuleAttribute::Priority(PRIORITY), RuleAttribute::FwMark(MARK)];
    message
}

fn route(family: Family) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header = RouteHeader {
        address_family: family.into(),
        table: TABLE,
        kind: RouteType::Local,
        scope: RouteScope::Host,
        protocol: rtnetlink::packet_route::route::RouteProtocol::Static,
        ..RouteHeader::default()
    };
    message.attributes = vec![RouteAttribute::Oif(LOOPBACK)];
    message
}

fn exists_is_fine(result: Result<(), rtnetlink::Error>) -> io::Result<()> {
    match result.map_err(as_io) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        other => other,
    }
}

fn absence_is_fine(result: Result<(), rtnetlink::Error>) -> io::Result<()> {
    match result.map_err(as_io) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => Ok(()),
        other => other,
    }
}

fn as_io(error: rtnetlink::Error) -> io::Error {
    match error {
        rtnetlink::Error::NetlinkError(message) => message.to_io(),
        other => io::Error::other(other),
    }
}

/// `/proc/sys/net` shows the namespace of the thread that looks.
fn read_sysctl(netns: &Netns, name: &str) -> Result<String, PodNetworkError> {
    let value = netns.run(|| std::fs::read_to_string(sysctl_path(name))).map_err(PodNetworkError::Enter)?;
    let part = || Part::Sysctl(name.to_owned());
    Ok(value.map_err(|source| PodNetworkError::Part { step: "read", part: part(), source })?.trim().to_owned())
}

fn write_sysctl(netns: &Netns, name: &str, value: &str) -> Result<(), PodNetworkError> {
    let written = netns.run(|| std::fs::write(sysctl_path(name), value)).map_err(PodNetworkError::Enter)?;
    let part = || Part::Sysctl(name.to_owned());
    written.map_err(|source| PodNetworkError::Part { step: "set", part: part(), source })
}

fn sysctl_path(name: &str) -> String {
    format!("/proc/sys/net/{name}")
}

/// What all our sysctls are set to.
const WANTED: &str = "1";
/// An accepted socket takes the mark of its SYN, so that the application's replies carry it.
const TCP_FWMARK_ACCEPT: &str = "ipv4/tcp_fwmark_accept";
/// All connections of the pod go to one port: without it, ports that rest in TIME_WAIT run out.
const TCP_TW_REUSE: &str = "ipv4/tcp_tw_reuse";
/// Resets of closed ports carry the mark too, else the proxy's dial would wait for its timeout.
const REFLECT_V4: &str = "ipv4/fwmark_reflect";
const REFLECT_V6: &str = "ipv6/fwmark_reflect";
/// `lo` has this index in every namespace.
const LOOPBACK: u32 = 1;

#[cfg(test)]
mod tests {
    use super::super::netns::tests::fresh;
    use super::*;

    const BOTH: Families = Families { v4: true, v6: true };

    fn ip(netns: &Netns, command: &str) -> String {
        let output = netns.run(|| std::process::Command::new("ip").args(command.split(' ')).output().unwrap()).unwrap();
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
    }

    fn pod() -> Netns {
        let netns = fresh();
        ip(&netns, "link set lo up");
        netns
    }

    /// Everything that an installation could have changed.
    fn picture(netns: &Netns) -> String {
        let mut text = String::new();
        for command in ["-4 rule", "-6 rule", "-4 route show table all", "-6 route show table all"] {
            text += &ip(netns, command);
        }
        for name in BOTH.sysctls() {
            text += &format!("{name}={}\n", read_sysctl(netns, name).unwrap());
        }
        text
    }

    #[tokio::test]
    async fn what_was_installed_is_there_and_goes_without_a_trace() {
        let pod = pod();
        let untouched = picture(&pod);
        let before = Before::read(&pod, BOTH).unwrap();
        assert!(before.sysctls.contains(&(TCP_TW_REUSE.into(), "2".into())));
        assert_eq!(missing(&pod, BOTH).await.unwrap().len(), 8);

        for _ in 0..2 {
            install(&pod, &before).await.unwrap();
            assert_eq!(missing(&pod, BOTH).await.unwrap(), []);
        }
        assert!(ip(&pod, "-4 rule").contains("32764:\tfrom all fwmark 0x539 lookup 100"));
        assert_eq!(
            ip(&pod, "-6 route show table 100").trim(),
            "local default dev lo proto static metric 1024 pref medium"
        );
        assert_eq!(ip(&pod, "-4 rule").matches("0x539").count(), 1);

        remove(&pod, &before).await.unwrap();
        assert_eq!(picture(&pod), untouched);
        remove(&pod, &before).await.unwrap();
    }

    #[tokio::test]
    async fn a_pod_without_ipv6_gets_its_ipv4_part() {
        let pod = pod();
        pod.run(|| std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").unwrap()).unwrap();
        let families = Families { v4: true, v6: false };
        let before = Before::read(&pod, families).unwrap();
        install(&pod, &before).await.unwrap();
        assert_eq!(missing(&pod, families).await.unwrap(), []);
        assert!(!ip(&pod, "-6 rule").contains("0x539"));
    }

    /// Field case B61: rules that somebody flushed.
    #[tokio::test]
    async fn what_somebody_took_away_is_named_and_put_back() {
        let pod = pod();
        let before = Before::read(&pod, BOTH).unwrap();
        install(&pod, &before).await.unwrap();
        ip(&pod, "-4 rule del priority 32764");
        ip(&pod, "-6 route flush table 100");
        write_sysctl(&pod, REFLECT_V6, "0").unwrap();
        let gone = [Part::Sysctl(REFLECT_V6.into()), Part::Rule(Family::V4), Part::Route(Family::V6)];
        assert_eq!(missing(&pod, BOTH).await.unwrap(), gone);
        install(&pod, &before).await.unwrap();
        assert_eq!(missing(&pod, BOTH).await.unwrap(), []);
    }

    #[tokio::test]
    async fn settings_of_the_pod_itself_are_kept() {
        let pod = pod();
        write_sysctl(&pod, TCP_TW_REUSE, "1").unwrap();
        ip(&pod, "rule add fwmark 0x111/0xfff lookup 100 priority 32764");
        let untouched = picture(&pod);
        let before = Before::read(&pod, BOTH).unwrap();
        install(&pod, &before).await.unwrap();
        // Changed by somebody else meanwhile: theirs stays.
        write_sysctl(&pod, REFLECT_V4, "0").unwrap();
        remove(&pod, &before).await.unwrap();
        assert_eq!(picture(&pod), untouched);
    }

    #[tokio::test]
    async fn what_is_read_after_an_installation_does_not_replace_what_was_read_before() {
        let pod = pod();
        let untouched = picture(&pod);
        let earlier = Before::read(&pod, BOTH).unwrap();
        install(&pod, &earlier).await.unwrap();
        let mut later = Before::read(&pod, Families { v4: true, v6: false }).unwrap();
        later.keep(&earlier);
        install(&pod, &later).await.unwrap();
        remove(&pod, &later).await.unwrap();
        assert_eq!(picture(&pod), untouched);
    }

    #[tokio::test]
    async fn the_addresses_are_those_of_the_namespace() {
        let pod = pod();
        ip(&pod, "addr add 10.77.0.9/32 dev lo");
        let found = addresses(&pod).await.unwrap();
        assert!(found.contains(&"10.77.0.9".parse().unwrap()) && found.contains(&"::1".parse().unwrap()), "{found:?}");
    }

    #[tokio::test]
    async fn other_namespaces_stay_as_they_are() {
        let (pod, other) = (pod(), pod());
        let untouched = picture(&other);
        install(&pod, &Before::read(&pod, BOTH).unwrap()).await.unwrap();
        assert_eq!(picture(&other), untouched);
    }
}
