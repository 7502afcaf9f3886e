//! Generates the wire types from `proto/`, without a system protoc, and notes the compiler's version.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(
        ["discovery.proto", "workload.proto", "authorization.proto", "citadel.proto", "trust.proto", "zds.proto"],
        ["proto"],
    )?;
    tonic_prost_build::configure().btree_map(".").bytes(".istio").include_file("wire.rs").compile_fds(files)?;
    let compiler = std::process::Command::new(std::env::var("RUSTC")?).arg("--version").output()?;
    println!("cargo:rustc-env=RUSTC_VERSION={}", String::from_utf8_lossy(&compiler.stdout).trim());
    Ok(())
}
