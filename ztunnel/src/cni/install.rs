//! Puts the plugin where container runtimes look for it: the program into the folder of plugins, and an entry at the end
//! of the chain that runtimes use. Runtimes take the first configuration of their folder by name; so does this.
//!
//! Must never leave half a file, change a chain that the plugin could not serve, nor touch what is not its own in one.

pub mod chain;
mod keep;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde_json::json;

pub use keep::{InstallState, keep};

use super::PLUGIN;
use crate::files::read_small_text;
use chain::ChainError;

/// Where to install, and what.
#[derive(Clone, Debug)]
pub struct Install {
    pub dirs: CniDirs,
    /// Write a configuration of our own, made from the runtime's and before it in the order of names, in the place of
    /// changing that one.
    pub own_file: bool,
    /// The program that is copied.
    pub program: PathBuf,
    pub entry: Entry,
}

/// The folders that runtimes read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CniDirs {
    /// Network configurations, such as /etc/cni/net.d.
    pub conf: PathBuf,
    /// Plugins, such as /opt/cni/bin.
    pub bin: PathBuf,
}

/// What the plugin is told by its entry in the chain.
#[derive(Clone, Debug)]
pub struct Entry {
    pub socket: PathBuf,
    pub exclude_namespaces: Vec<String>,
    pub timeout_seconds: u64,
}

/// How things stand in the folder of configurations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// There is no configuration yet that could be extended.
    NoChain,
    /// The chain in use has the entry.
    InPlace(PathBuf),
    /// It has just been put there.
    Put(PathBuf),
    /// It has not: nothing was to be written.
    Missing(PathBuf),
    /// Somebody wrote it in the same moment: it has to be looked at again.
    Changed(PathBuf),
}

#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    #[error("cannot {step} {}: {source}", path.display())]
    Io { step: &'static str, path: PathBuf, source: io::Error },
    #[error("the CNI configuration {}: {source}", path.display())]
    Chain { path: PathBuf, source: ChainError },
}

impl Entry {
    /// One line of JSON.
    pub fn to_json(&self) -> String {
        json!({
            "type": PLUGIN,
            "socket": self.socket,
            "excludeNamespaces": self.exclude_namespaces,
            "timeoutSeconds": self.timeout_seconds,
        })
        .to_string()
    }
}

/// Copies the program into the folder of plugins, unless it is there; whether it was not.
pub fn install_program(program: &Path, bin_dir: &Path) -> Result<bool, InstallError> {
    let path = bin_dir.join(PLUGIN);
    if same_content(program, &path).unwrap_or(false) {
        return Ok(false);
    }
    fs::create_dir_all(bin_dir).map_err(failed("make", bin_dir))?;
    let source = File::open(program).map_err(failed("read", program))?;
    replace(&path, 0o755, |file| io::copy(&mut &source, file).map(drop))?;
    Ok(true)
}

/// Makes the chain that runtimes use have the entry. With `write` off it only looks.
pub fn install_entry(install: &Install, write: bool) -> Result<Standing, InstallError> {
    let dir = &install.dirs.conf;
    let names = configurations(dir)?;
    let (own, sources): (Vec<&String>, Vec<&String>) = names.iter().partition(|name| name.ends_with(OWN_SUFFIX));
    let entry = install.entry.to_json();
    let (mut usable, mut broken) = (None, None);
    for source in sources {
        match extended(dir.join(source), &entry) {
            // Runtimes that take the next one, where one is broken, must find the entry there.
            Err(error) if error.is_of_a_broken_file() => drop(broken.get_or_insert(error)),
            found => {
                usable = Some((source, found?));
                break;
            }
        }
    }
    let Some((source, Extended { path, text, wanted, is_list })) = usable else {
        if let Some(error) = broken {
            return Err(error);
        }
        // Those that ours were made from are gone, and so is what they lead to.
        remove_own(dir, &own, None, write)?;
        return Ok(Standing::NoChain);
    };
    let (stem, _) = source.rsplit_once('.').unwrap_or((source, ""));
    let in_place = is_list && !install.own_file;
    let target = if in_place { path.clone() } else { dir.join(format!("{stem}{OWN_SUFFIX}")) };
    let wanted = wanted.unwrap_or_else(|| text.clone());
    let there = read_small_text(&target, MAX_CONFIGURATION).is_ok_and(|held| held == wanted);
    if !there {
        if !write {
            return Ok(Standing::Missing(target));
        }
        // As the configuration that it is made from: it may hold secrets.
        let mode = fs::metadata(&path).map_err(failed("look at", &path))?.permissions().mode() & 0o777;
        // Whoever writes theirs in this moment must not lose it.
        let is_same = || read_small_text(&path, MAX_CONFIGURATION).is_ok_and(|now| now == text);
        if !replace_if(&target, mode, |file| file.write_all(wanted.as_bytes()), is_same)? {
            return Ok(Standing::Changed(target));
        }
    }
    remove_own(dir, &own, Some(&target), write)?;
    Ok(if there { Standing::InPlace(target) } else { Standing::Put(target) })
}

/// A configuration, and what it is with the entry.
struct Extended {
    path: PathBuf,
    text: String,
    wanted: Option<String>,
    is_list: bool,
}

fn extended(path: PathBuf, entry: &str) -> Result<Extended, InstallError> {
    let text = read_small_text(&path, MAX_CONFIGURATION).map_err(failed("read", &path))?;
    let is_list = path.extension().is_some_and(|extension| extension == "conflist");
    let wanted = if is_list { chain::with_entry(&text, entry) } else { chain::list_of(&text, entry).map(Some) };
    match wanted {
        Ok(wanted) => Ok(Extended { path, text, wanted, is_list }),
        Err(source) => Err(InstallError::Chain { path, source }),
    }
}

impl InstallError {
    /// No runtime can use the configuration, whatever it does then.
    fn is_of_a_broken_file(&self) -> bool {
        match self {
            Self::Io { source, .. } => {
                matches!(source.kind(), io::ErrorKind::IsADirectory | io::ErrorKind::InvalidData)
            }
            Self::Chain { source, .. } => !matches!(source, ChainError::Version(_)),
        }
    }
}

/// Takes everything away: first the entry, so that no runtime calls a plugin that is not there, then the program, unless
/// it is to stay. Returns what it did.
pub fn remove(dirs: &CniDirs, keep_program: bool) -> Result<Vec<String>, InstallError> {
    let mut done = Vec::new();
    for name in configurations(&dirs.conf)? {
        let path = dirs.conf.join(&name);
        if name.ends_with(OWN_SUFFIX) {
            remove_file(&path)?;
            done.push(format!("removed {}", path.display()));
            continue;
        }
        // What cannot be read is not ours, and does not stop the rest.
        let text = match read_small_text(&path, MAX_CONFIGURATION) {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => continue,
            other => other.map_err(failed("read", &path))?,
        };
        if let Ok(Some(without)) = chain::without_entry(&text) {
            let mode = fs::metadata(&path).map_err(failed("look at", &path))?.permissions().mode() & 0o777;
            // As it is put in: what another writes in this moment is not lost.
            let is_same = || read_small_text(&path, MAX_CONFIGURATION).is_ok_and(|now| now == text);
            let removed = replace_if(&path, mode, |file| file.write_all(without.as_bytes()), is_same)?;
            done.push(match removed {
                true => format!("entry removed from {}", path.display()),
                false => format!("entry NOT removed from {}, which another program has just written", path.display()),
            });
        }
    }
    let program = dirs.bin.join(PLUGIN);
    if !keep_program && remove_file(&program)? {
        done.push(format!("removed {}", program.display()));
    }
    Ok(done)
}

/// Names of the configurations in the order in which runtimes take them.
fn configurations(dir: &Path) -> Result<Vec<String>, InstallError> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(failed("list", dir))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed("list", dir))?.file_name();
        if let Some(name) = name.to_str()
            && EXTENSIONS.iter().any(|extension| name.ends_with(extension))
        {
            names.push(name.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

fn remove_own(dir: &Path, own: &[&String], but: Option<&Path>, write: bool) -> Result<(), InstallError> {
    for path in own.iter().map(|name| dir.join(name)) {
        if write && Some(path.as_path()) != but {
            remove_file(&path)?;
        }
    }
    Ok(())
}

/// Whether it was there.
fn remove_file(path: &Path) -> Result<bool, InstallError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        other => other.map(|()| true).map_err(failed("remove", path)),
    }
}

/// Writes a file beside, on the disk before it is moved into place: no crash leaves half of one. Its name beside has no
/// extension that runtimes look for.
fn replace(path: &Path, mode: u32, write: impl FnOnce(&mut File) -> io::Result<()>) -> Result<(), InstallError> {
    replace_if(path, mode, write, || true).map(drop)
}

/// As [`replace`], unless `check` says no in the last moment; whether it did not.
fn replace_if(
    path: &Path,
    mode: u32,
    write: impl FnOnce(&mut File) -> io::Result<()>,
    check: impl FnOnce() -> bool,
) -> Result<bool, InstallError> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".understory-new");
    let temporary = PathBuf::from(temporary);
    let written = || -> io::Result<bool> {
        let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(mode).open(&temporary)?;
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        write(&mut file)?;
        file.sync_all()?;
        if !check() {
            return Ok(false);
        }
        fs::rename(&temporary, path)?;
        path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())?;
        Ok(true)
    };
    let result = written().map_err(failed("write", path));
    if !matches!(result, Ok(true)) {
        // What there is of it takes room that may be what is missing.
        let _ = fs::remove_file(&temporary);
    }
    result
}

fn same_content(a: &Path, b: &Path) -> io::Result<bool> {
    let (mut a, mut b) = (File::open(a)?, File::open(b)?);
    if a.metadata()?.len() != b.metadata()?.len() || b.metadata()?.permissions().mode() & 0o777 != 0o755 {
        return Ok(false);
    }
    let mut buffers = (vec![0; COMPARE], vec![0; COMPARE]);
    loop {
        let taken = a.read(&mut buffers.0)?;
        if taken == 0 {
            return Ok(true);
        }
        b.read_exact(&mut buffers.1[..taken])?;
        if buffers.0[..taken] != buffers.1[..taken] {
            return Ok(false);
        }
    }
}

fn failed<'a>(step: &'static str, path: &'a Path) -> impl Fn(io::Error) -> InstallError + 'a {
    move |source| InstallError::Io { step, path: path.to_owned(), source }
}

/// What runtimes take for configurations.
const EXTENSIONS: [&str; 3] = [".conf", ".conflist", ".json"];
/// Ends the names of configurations that we made: "10-x-understory.conflist" stands before "10-x.conf" and
/// "10-x.conflist", since "-" stands before ".".
const OWN_SUFFIX: &str = "-understory.conflist";
/// Bytes of a configuration.
const MAX_CONFIGURATION: usize = 1 << 20;
const COMPARE: usize = 256 << 10;

#[cfg(test)]
mod tests;
