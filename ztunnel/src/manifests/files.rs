//! Files that are read once, for commands: the same reading as that of the watched folder.

use std::collections::HashMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::document::{self, Document, Format};
use super::folder::{Content, FileChange, Folder};
use super::locate::{self, FieldPath};
use super::merge::Merge;
use super::objects::{ObjectKey, Objects, Problem};

/// Objects from some files, and where in them each part of an object stands.
#[derive(Debug, Default)]
pub struct Files {
    merge: Merge,
    texts: Vec<(PathBuf, Format, String)>,
    /// File, and line of its document.
    places: HashMap<ObjectKey, (usize, usize)>,
    problems: Vec<Problem>,
}

impl Files {
    /// Reads a file, or the files directly in a folder that [`watch`](super::watch) would read; `-` is what `stdin`
    /// gives. What cannot be read is a [problem](Self::problems).
    pub fn read(&mut self, path: &Path, stdin: &mut dyn Read) {
        if path == Path::new("-") {
            let mut text = String::new();
            match stdin.read_to_string(&mut text) {
                Ok(_) => self.take("(stdin)".into(), text),
                Err(e) => self.unreadable("(stdin)".into(), &e),
            }
            return;
        }
        if !path.is_dir() {
            return self.read_file(path.to_owned());
        }
        match Folder::new(path, Content::Manifests).list() {
            Ok(names) => names.iter().for_each(|name| self.read_file(path.join(&**name))),
            Err(e) => self.unreadable(path.to_owned(), &e),
        }
    }

    /// What the files hold together.
    pub fn objects(&self) -> &Objects {
        self.merge.objects()
    }

    /// Each object once, in the order of the files.
    pub fn keys(&self) -> Vec<&ObjectKey> {
        let mut keys: Vec<_> = self.places.iter().collect();
        keys.sort_by_key(|(key, place)| (**place, (*key).clone()));
        keys.into_iter().map(|(key, _)| key).collect()
    }

    /// What in the files cannot be read, in their order.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = self.problems.clone();
        self.merge.problems(|_, file| self.path_of(file), &mut problems);
        problems.sort_by_key(|p| (self.texts.iter().position(|(path, ..)| *path == p.file), p.line));
        problems
    }

    /// File and line of an object.
    pub fn place(&self, key: &ObjectKey) -> Option<(&Path, usize)> {
        let (file, line) = self.places.get(key)?;
        Some((&self.texts[*file].0, *line))
    }

    /// File and line of a part of an object, or of what is nearest to it.
    pub fn place_of(&self, key: &ObjectKey, part: &FieldPath) -> Option<(&Path, usize)> {
        let (file, start) = self.places.get(key)?;
        let (path, format, text) = &self.texts[*file];
        let (line, document) = document::split_as(text, *format).into_iter().rev().find(|(line, _)| line <= start)?;
        let json = *format == Format::Json;
        let part = document::way_to(document, json, key, part);
        let found = locate::line(document, json, &part).map_or(*start, |l| line + l - 1);
        Some((path, found))
    }

    fn read_file(&mut self, path: PathBuf) {
        match std::fs::read_to_string(&path) {
            Ok(text) => self.take(path, text),
            Err(e) => self.unreadable(path, &e),
        }
    }

    fn take(&mut self, path: PathBuf, text: String) {
        let json = path.extension().is_some_and(|e| e == "json");
        let format = if json { Format::Json } else { Format::Yaml };
        let text = text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text);
        let file = self.texts.len();
        let documents = document::read(&text, format, "", &[]);
        let faults = documents.iter().flat_map(|d| &d.faults);
        self.problems.extend(faults.map(|fault| Problem {
            file: path.clone(),
            line: fault.line,
            object: fault.object.clone(),
            reason: fault.reason.clone(),
        }));
        let mut after = Vec::new();
        for Document { line, objects, .. } in documents {
            for (key, object) in objects {
                self.places.entry(key.clone()).or_insert((file, line));
                after.push((key, object, line));
            }
        }
        // Of two files with one object the first counts.
        let change = FileChange { file: format!("{file:09}").into(), before: Vec::new(), after, settled: true };
        self.merge.apply(change, Instant::now());
        self.texts.push((path, format, text));
    }

    fn unreadable(&mut self, file: PathBuf, error: &io::Error) {
        self.problems.push(Problem { file, line: None, object: None, reason: format!("cannot be read: {error}") });
    }

    fn path_of(&self, file: &str) -> PathBuf {
        file.parse::<usize>().ok().and_then(|index| self.texts.get(index)).map(|t| t.0.clone()).unwrap_or_default()
    }
}
