use super::*;

fn parse(args: &[&str]) -> Result<ProxyConfig, String> {
    with_environment(args, &[])
}

fn with_environment(args: &[&str], environment: &[(&str, &str)]) -> Result<ProxyConfig, String> {
    let args = ["ztunnel", "--node-name", "node-a"].iter().chain(args);
    let args = ProxyArgs::try_parse_from(args).map_err(|e| e.to_string())?;
    let environment = environment.iter().map(|(k, v)| (k.to_string(), v.to_string()));
    args.check(environment).map_err(|e| e.to_string())
}

#[test]
fn defaults_are_those_of_the_field() {
    let config = parse(&[]).unwrap();
    assert_eq!(config.mesh.cluster_id(), "Kubernetes");
    assert_eq!(config.control.xds_address.uri(), "https://control.understory-system.svc:15012");
    assert_eq!(config.control.ca_address, config.control.xds_address);
    assert_eq!(config.control.secret_ttl, Duration::from_secs(86400));
    assert_eq!(config.timeouts.connect, Duration::from_secs(10));
    assert_eq!(config.timeouts.own_workload, Duration::from_secs(5));
    assert_eq!(config.timeouts.tunnel_idle, Duration::from_secs(300));
    assert_eq!(config.timeouts.drain, Duration::from_secs(5));
    assert_eq!(config.limits.stream_window, 256 << 10);
    assert_eq!(config.limits.connection_window, 201 * (256 << 10));
    assert!(config.threads >= 1);
    assert!(!config.control.on_demand);
    let trust = config.trust.settings(&config.mesh.trust_domain);
    assert!(trust.aliases.is_empty() && trust.revocation.is_none());
    assert_eq!(config.trust.expiry_connections, AtExpiry::Keep);
}

#[test]
fn revocation_is_closed_unless_it_is_opened_and_the_own_trust_domain_is_no_alias() {
    use crate::identity::{RevocationRules, Rule};
    let trust = |args: &[&str]| {
        let config = parse(args).unwrap();
        config.trust.settings(&config.mesh.trust_domain)
    };
    let closed = RevocationRules { unknown_issuer: Rule::Deny, outdated: Rule::Deny };
    assert_eq!(trust(&["--crl-path=/etc/crl.pem"]).revocation, Some(closed));
    let open = trust(&["--crl-path=/etc/crl.pem", "--crl-unknown-issuer=allow", "--crl-expired=allow"]).revocation;
    assert_eq!(open, Some(RevocationRules { unknown_issuer: Rule::Allow, outdated: Rule::Allow }));
    let aliases = trust(&["--trust-domain=new.example", "--trust-domain-aliases=old.example,new.example"]).aliases;
    assert_eq!(aliases, [TrustDomain::new("old.example")]);
}

#[test]
fn a_wrong_value_names_the_setting_the_value_and_what_is_right() {
    let cases: &[(&str, &str, &str, &str)] = &[
        ("--threads", "0", "ZTUNNEL_WORKER_THREADS", "1 to 1024"),
        ("--threads", "150%", "ZTUNNEL_WORKER_THREADS", "1% to 100%"),
        ("--xds-address", "control:15012", "XDS_ADDRESS", "https://host:port"),
        ("--xds-address", "https://", "XDS_ADDRESS", "https://host:port"),
        ("--xds-address", "https://control:99999", "XDS_ADDRESS", "https://host:port"),
        ("--xds-address", "https://user@control:1", "XDS_ADDRESS", "https://host:port"),
        ("--ca-address", "https://a/b", "CA_ADDRESS", "https://host:port"),
        ("--connect-timeout", "ten", "CONNECT_TIMEOUT", "such as 500ms"),
        ("--connect-timeout", "0s", "CONNECT_TIMEOUT", "more than 0"),
        ("--connect-timeout", "30s", "CONNECT_TIMEOUT", "less than 30s"),
        ("--memory-limit", "0", "MEMORY_LIMIT", "more than"),
        ("--log-format", "xml", "LOG_FORMAT", "plain, json"),
        ("--log-levels", "chatty", "RUST_LOG", "info,access=debug"),
        ("--admin-addr", "15000", "ADMIN_ADDR", "127.0.0.1:15000"),
        ("--cluster-cidrs", "10.0.0.0/99", "CLUSTER_CIDRS", "10.0.0.0/8"),
        ("--instance-ip", "here", "INSTANCE_IP", "IP address"),
        ("--trust-domain", "Cluster Local", "TRUST_DOMAIN", "cluster.local"),
        ("--trust-domain-aliases", "Old One", "TRUST_DOMAIN_ALIASES", "cluster.local"),
        ("--crl-path", " ", "CRL_PATH", "path of a file"),
        ("--crl-unknown-issuer", "maybe", "CRL_UNKNOWN_ISSUER", "deny, allow"),
        ("--crl-expired", "yes", "CRL_EXPIRED", "deny, allow"),
        ("--expiry-connections", "drop", "CERTIFICATE_EXPIRY_CONNECTIONS", "keep, cut"),
        ("--stream-window", "1Ki", "HTTP2_STREAM_WINDOW_SIZE", "64Ki to 2Gi-1"),
        ("--connection-window", "256Ki", "HTTP2_CONNECTION_WINDOW_SIZE", "more than --stream-window"),
        ("--frame-size", "1Ki", "HTTP2_FRAME_SIZE", "16Ki to 16Mi-1"),
        ("--max-streams", "0", "HBONE_MAX_STREAMS", "from 1"),
        ("--metrics-addr", "[::]:15021", "METRICS_ADDR", "each server needs its own"),
        ("--xds-root-ca", "-----BEGIN CERTIFICATE-----", "XDS_ROOT_CA", "-----END CERTIFICATE-----"),
    ];
    for (flag, value, setting, right) in cases {
        let error = parse(&[&format!("{flag}={value}")]).expect_err(flag);
        let value = if *flag == "--metrics-addr" { "15021" } else { value };
        for part in [setting, value, right] {
            assert!(error.contains(part), "{flag}={value}: {part:?} is missing in: {error}");
        }
    }
}

#[test]
fn the_node_must_be_named() {
    let error = ProxyArgs::try_parse_from(["ztunnel"]).unwrap_err().to_string();
    assert!(error.contains("--node-name"), "{error}");
}

#[test]
fn the_drain_deadline_follows_the_grace_period() {
    for (grace, deadline) in [("30", 25), ("11", 6), ("10", 9), ("1", 1)] {
        let config = parse(&["--termination-grace-period", grace]).unwrap();
        assert_eq!(config.timeouts.drain, Duration::from_secs(deadline), "{grace}");
    }
    let config = parse(&["--drain-deadline", "2s", "--termination-grace-period", "30"]).unwrap();
    assert_eq!(config.timeouts.drain, Duration::from_secs(2));
}

#[test]
fn open_ended_settings_come_from_the_environment() {
    let config = with_environment(
        &[],
        &[
            ("CLUSTER_ID", "east"),
            ("ISTIO_META_ENABLE", "yes"),
            ("ISTIO_METAJSON_LABELS", r#"{"a":"b"}"#),
            ("XDS_HEADER_x-tenant", "blue"),
        ],
    )
    .unwrap();
    assert_eq!(config.mesh.cluster_id(), "east");
    assert_eq!(config.control.metadata["ENABLE"], "yes");
    assert_eq!(config.control.metadata["LABELS"]["a"], "b");
    assert_eq!(config.control.xds_headers["x-tenant"], "blue");
    assert!(with_environment(&[], &[("ISTIO_METAJSON_LABELS", "{")]).unwrap_err().contains("ISTIO_METAJSON_LABELS"));
}

#[test]
fn on_demand_is_a_switch_and_a_value() {
    assert!(parse(&["--xds-on-demand"]).unwrap().control.on_demand);
    assert!(parse(&["--xds-on-demand=true"]).unwrap().control.on_demand);
    assert!(!parse(&["--xds-on-demand=false"]).unwrap().control.on_demand);
    assert!(parse(&["--xds-on-demand=maybe"]).unwrap_err().contains("XDS_ON_DEMAND"));
}

#[test]
fn durations_and_sizes_read_what_they_say() {
    for (text, milliseconds) in [("500ms", 500), ("10s", 10_000), ("1h30m", 5_400_000), ("7", 7_000)] {
        assert_eq!(duration(text).unwrap(), Duration::from_millis(milliseconds), "{text}");
    }
    for text in ["", "s", "10x", "-1s", "1s5", "99999999999999999999h"] {
        assert!(duration(text).is_err(), "{text}");
    }
    for (text, bytes) in [("1", 1), ("64Ki", 65536), ("4Mi", 4 << 20), ("1Gi", 1 << 30)] {
        assert_eq!(size(text).unwrap(), Bytes(bytes), "{text}");
        assert_eq!(size(text).unwrap().to_string(), text);
    }
    assert!(size("1KB").is_err() && size("").is_err() && size("99999999999Gi").is_err());
}

#[test]
fn roots_tokens_and_endpoints_are_told_apart() {
    assert_eq!(RootSource::parse("SYSTEM").unwrap(), RootSource::System);
    assert_eq!(RootSource::parse("/a/b.pem").unwrap(), RootSource::File("/a/b.pem".into()));
    assert!(matches!(TokenSource::parse("eyJhb.eyJp.c2ln").unwrap(), TokenSource::Literal(_)));
    assert!(matches!(TokenSource::parse("/var/run/token").unwrap(), TokenSource::File(_)));
    let endpoint = endpoint("https://[fd00::1]:15012").unwrap();
    assert_eq!((endpoint.host.as_str(), endpoint.port), ("fd00::1", 15012));
    assert_eq!(endpoint.uri(), "https://[fd00::1]:15012");
}

#[test]
fn the_dump_shows_settings_but_no_secret() {
    let config = with_environment(&["--auth-token=eyJhb.eyJp.c2ln"], &[("CA_HEADER_x-key", "s3cret")]).unwrap();
    let dump = serde_json::to_string(&config).unwrap();
    assert!(dump.contains(r#""xdsAddress":"https://control.understory-system.svc:15012""#), "{dump}");
    assert!(dump.contains(r#""connect":"10s""#), "{dump}");
    assert!(dump.contains("x-key") && !dump.contains("s3cret") && !dump.contains("c2ln"), "{dump}");
}
