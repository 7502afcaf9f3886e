//! `cargo xtask image`: the programs as an OCI image, made without a daemon, with a bill of materials (SPDX).
//!
//! Must never depend on when, where or by whom it was made: the same programs of the same commit give the same bytes.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::build::{self, Profile, cargo, root};

/// What the image has in /usr/local/bin, by package.
const PROGRAMS: [&str; 2] = ["ztunnel", "control"];

/// By this name runtimes find an image that was imported, not pulled.
const NAME: &str = "localhost/understory";

/// Who runs in it, where a pod says nothing else.
const PASSWD: &str = "root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n";
const GROUP: &str = "root:x:0:\nnonroot:x:65532:\n";

/// Builds the programs, statically linked, and writes the image and beside it the bill (`.spdx.json`).
pub fn run(output: &Path, profile: Profile) -> Result<()> {
    let dir = build::statically(profile, &PROGRAMS)?;
    let version = env!("CARGO_PKG_VERSION");
    let time = time_of_commit();
    let bill = bill(version, time)?.to_string() + "\n";
    let mut layer = Tar::new(time);
    for folder in ["etc", "usr", "usr/local", "usr/local/bin", "usr/share", "usr/share/understory"] {
        layer.folder(folder, 0o755);
    }
    layer.folder("tmp", 0o1777);
    layer.file("etc/passwd", 0o644, PASSWD.as_bytes());
    layer.file("etc/group", 0o644, GROUP.as_bytes());
    layer.file("usr/share/understory/sbom.spdx.json", 0o644, bill.as_bytes());
    for program in PROGRAMS {
        let path = dir.join(program);
        let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        layer.file(&format!("usr/local/bin/{program}"), 0o755, &bytes);
    }
    let image = layout(&layer.finish(), version, time)?;
    if let Some(parent) = output.parent() {
        fs::create_dir_all(parent).with_context(|| format!("make {}", parent.display()))?;
    }
    let beside = output.with_extension("spdx.json");
    for (path, bytes) in [(output, image.as_slice()), (&beside, bill.as_bytes())] {
        fs::write(path, bytes).with_context(|| format!("write {}", path.display()))?;
    }
    println!("{NAME}:{version}: {} MB in {}", image.len() >> 20, output.display());
    println!("its bill of materials: {}", beside.display());
    println!("for a node's containerd: ctr -n k8s.io images import {}", output.display());
    Ok(())
}

/// Where the image goes unless told otherwise.
pub fn default_output() -> PathBuf {
    root().join("target/image/understory.tar")
}

/// An OCI layout in one file, with the list by which docker loads it.
fn layout(layer: &[u8], version: &str, time: u64) -> Result<Vec<u8>> {
    let machine = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let layer_digest = sha256(layer)?;
    let created = rfc3339(time);
    let config = json!({
        "architecture": machine,
        "os": "linux",
        "created": created,
        "config": {
            "Entrypoint": ["/usr/local/bin/ztunnel"],
            "Env": ["PATH=/usr/local/bin"],
            "WorkingDir": "/",
            "Labels": {
                "org.opencontainers.image.title": "understory",
                "org.opencontainers.image.version": version,
                "org.opencontainers.image.licenses": "Apache-2.0",
            },
        },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{layer_digest}")] },
        "history": [{ "created": created, "created_by": "cargo xtask image" }],
    })
    .to_string();
    let config_digest = sha256(config.as_bytes())?;
    let part = |kind: &str, digest: &str, size: usize| {
        json!({
            "mediaType": format!("application/vnd.oci.image.{kind}"),
            "digest": format!("sha256:{digest}"),
            "size": size,
        })
    };
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": part("config.v1+json", &config_digest, config.len()),
        "layers": [part("layer.v1.tar", &layer_digest, layer.len())],
    })
    .to_string();
    let manifest_digest = sha256(manifest.as_bytes())?;
    let mut entry = part("manifest.v1+json", &manifest_digest, manifest.len());
    entry["platform"] = json!({ "architecture": machine, "os": "linux" });
    entry["annotations"] = json!({
        "io.containerd.image.name": format!("{NAME}:{version}"),
        "org.opencontainers.image.ref.name": version,
    });
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [entry],
    });
    let blob = |digest: &str| format!("blobs/sha256/{digest}");
    let docker = json!([{
        "Config": blob(&config_digest),
        "RepoTags": [format!("{NAME}:{version}")],
        "Layers": [blob(&layer_digest)],
    }]);
    let mut tar = Tar::new(time);
    tar.folder("blobs", 0o755);
    tar.folder("blobs/sha256", 0o755);
    tar.file(&blob(&config_digest), 0o644, config.as_bytes());
    tar.file(&blob(&layer_digest), 0o644, layer);
    tar.file(&blob(&manifest_digest), 0o644, manifest.as_bytes());
    tar.file("index.json", 0o644, index.to_string().as_bytes());
    tar.file("manifest.json", 0o644, docker.to_string().as_bytes());
    tar.file("oci-layout", 0o644, json!({ "imageLayoutVersion": "1.0.0" }).to_string().as_bytes());
    Ok(tar.finish())
}

/// What the programs consist of: every crate that is linked into them.
fn bill(version: &str, time: u64) -> Result<Value> {
    let output = cargo(&["metadata", "--format-version", "1", "--locked", "--filter-platform", build::TARGET])
        .output()
        .context("start cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    let metadata: Value = serde_json::from_slice(&output.stdout).context("read cargo metadata")?;
    let linked = linked(&metadata)?;
    let mut packages = Vec::new();
    let mut relations = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let text = |field: &str| package[field].as_str();
        let (Some(id), Some(name), Some(number)) = (text("id"), text("name"), text("version")) else { continue };
        if !linked.contains(id) {
            continue;
        }
        let key = format!("SPDXRef-{name}-{}", number.replace('+', "-"));
        relations.push(json!({
            "spdxElementId": "SPDXRef-DOCUMENT",
            "relationshipType": "DESCRIBES",
            "relatedSpdxElement": key,
        }));
        packages.push(json!({
            "SPDXID": key.replace('_', "-"),
            "name": name,
            "versionInfo": number,
            "downloadLocation": text("repository").unwrap_or("NOASSERTION"),
            "licenseDeclared": text("license").map_or("NOASSERTION".to_owned(), |license| license.replace('/', " OR ")),
            "licenseConcluded": "NOASSERTION",
            "copyrightText": "NOASSERTION",
            "filesAnalyzed": false,
            "externalRefs": [{
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": format!("pkg:cargo/{name}@{number}"),
            }],
        }));
    }
    for relation in &mut relations {
        let fixed = relation["relatedSpdxElement"].as_str().unwrap_or_default().replace('_', "-");
        relation["relatedSpdxElement"] = fixed.into();
    }
    Ok(json!({
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": format!("understory-{version}"),
        "documentNamespace": format!("urn:understory:sbom:{version}:{time}"),
        "creationInfo": { "created": rfc3339(time), "creators": ["Tool: cargo-xtask-image"] },
        "packages": packages,
        "relationships": relations,
    }))
}

/// Ids of the packages that the programs' packages lead to, other than by what is only for building and tests.
fn linked(metadata: &Value) -> Result<BTreeSet<String>> {
    let nodes = metadata["resolve"]["nodes"].as_array().context("cargo metadata has no resolve")?;
    let packages = metadata["packages"].as_array().context("cargo metadata has no packages")?;
    let of_ours = packages.iter().filter(|p| PROGRAMS.iter().any(|name| p["name"] == *name) && p["source"].is_null());
    let mut waiting: Vec<String> = of_ours.filter_map(|p| p["id"].as_str().map(str::to_owned)).collect();
    let mut found = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        let node = nodes.iter().find(|node| node["id"] == id.as_str());
        if !found.insert(id) {
            continue;
        }
        for dependency in node.into_iter().flat_map(|node| node["deps"].as_array().into_iter().flatten()) {
            let mut kinds = dependency["dep_kinds"].as_array().into_iter().flatten();
            if kinds.any(|kind| kind["kind"].is_null()) {
                waiting.extend(dependency["pkg"].as_str().map(str::to_owned));
            }
        }
    }
    Ok(found)
}

/// When the commit was made, as seconds since 1970; SOURCE_DATE_EPOCH counts first, and without either it is 0.
fn time_of_commit() -> u64 {
    if let Some(time) = std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|text| text.parse().ok()) {
        return time;
    }
    let output = Command::new("git").args(["log", "-1", "--format=%ct"]).current_dir(root()).output();
    let text = output.ok().filter(|output| output.status.success()).map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&text).trim().parse().unwrap_or(0)
}

/// Days to dates by the rule of the Gregorian calendar, in years that begin in March.
fn rfc3339(time: u64) -> String {
    let (days, rest) = (time / 86_400 + 719_468, time % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3_600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

fn sha256(bytes: &[u8]) -> Result<String> {
    let mut command = Command::new("sha256sum");
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("start sha256sum, of coreutils")?;
    let mut stdin = child.stdin.take().context("sha256sum has no standard input")?;
    stdin.write_all(bytes).context("write to sha256sum")?;
    drop(stdin);
    let output = child.wait_with_output().context("wait for sha256sum")?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.split(' ').next() {
        Some(digest) if output.status.success() && digest.len() == 64 => Ok(digest.to_owned()),
        _ => bail!("sha256sum failed ({}): {text}", output.status),
    }
}

/// A tar archive (ustar) whose entries belong to root and are all of one time.
struct Tar {
    bytes: Vec<u8>,
    time: u64,
}

impl Tar {
    fn new(time: u64) -> Self {
        Self { bytes: Vec::new(), time }
    }

    fn folder(&mut self, name: &str, mode: u32) {
        self.entry(&format!("{name}/"), mode, b'5', &[]);
    }

    fn file(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entry(name, mode, b'0', content);
    }

    fn entry(&mut self, name: &str, mode: u32, kind: u8, content: &[u8]) {
        let mut header = [0; BLOCK];
        let mut put = |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
        assert!(name.len() < 100, "{name} is too long for a tar archive");
        put(0, name);
        put(100, &format!("{mode:07o}"));
        put(108, "0000000");
        put(116, "0000000");
        put(124, &format!("{:011o}", content.len()));
        put(136, &format!("{:011o}", self.time));
        put(148, "        ");
        put(257, "ustar");
        put(263, "00");
        header[156] = kind;
        // Over all bytes, with blanks where it goes itself.
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.bytes.extend(header);
        self.bytes.extend(content);
        self.bytes.resize(self.bytes.len().next_multiple_of(BLOCK), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len() + 2 * BLOCK, 0);
        self.bytes
    }
}

const BLOCK: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_content_gives_the_same_bytes_and_tar_reads_them() {
        let make = || {
            layout(
                &{
                    let mut layer = Tar::new(1_700_000_000);
                    layer.folder("tmp", 0o1777);
                    layer.file("tmp/a", 0o755, b"hello");
                    layer.finish()
                },
                "1.2.3",
                1_700_000_000,
            )
            .expect("an image")
        };
        let image = make();
        assert_eq!(image, make());
        let list = Command::new("tar").args(["-tv", "-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut list = list.expect("start tar");
        list.stdin.take().expect("piped").write_all(&image).expect("write");
        let output = list.wait_with_output().expect("wait");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
        for name in ["index.json", "oci-layout", "manifest.json", "blobs/sha256/"] {
            assert!(text.contains(name), "{text}");
        }
        assert!(text.contains("0/0") && text.contains("2023-11-14"), "{text}");
    }

    #[test]
    fn the_bill_names_what_is_linked_and_not_what_only_tests_need() {
        let bill = bill("1.2.3", 0).expect("a bill");
        let has = |name: &str| bill["packages"].as_array().expect("a list").iter().any(|p| p["name"] == name);
        assert!(has("rustls") && has("tokio") && has("ztunnel") && has("control"));
        assert!(!has("proptest") && !has("tests") && !has("xtask"));
        assert_eq!(bill["creationInfo"]["created"], "1970-01-01T00:00:00Z");
    }

    #[test]
    fn times_are_dates() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(rfc3339(1_700_000_000), "2023-11-14T22:13:20Z");
        assert_eq!(rfc3339(1_798_761_599), "2026-12-31T23:59:59Z");
    }

    #[test]
    fn digests_are_those_of_sha256() {
        assert_eq!(
            sha256(b"abc").expect("a digest"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
