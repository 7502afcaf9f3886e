//! Where the parts of a JSON text lie, so that one can be handed on, or the text be changed, with every other byte as it
//! was.
//!
//! Must never guess: what is not JSON gives nothing.

use std::ops::Range;

/// A text that is known to be JSON.
#[derive(Clone, Copy, Debug)]
pub struct Json<'a>(&'a str);

impl<'a> Json<'a> {
    /// Checks the text as a whole.
    pub fn new(text: &'a str) -> Result<Json<'a>, serde_json::Error> {
        serde_json::from_str::<serde::de::IgnoredAny>(text)?;
        Ok(Json(text))
    }

    pub fn text(self, span: &Range<usize>) -> &'a str {
        self.0.get(span.clone()).unwrap_or_default()
    }

    /// The value that is the whole text.
    pub fn root(self) -> Range<usize> {
        let start = self.0.len() - self.0.trim_start().len();
        start..self.0.trim_end().len()
    }

    /// The value of a member of an object; of the last one where there are several, as most readers have it.
    pub fn member(self, object: &Range<usize>, name: &str) -> Option<Range<usize>> {
        let mut cursor = Cursor { bytes: self.0.as_bytes(), at: object.start };
        let mut found = None;
        cursor.take(b'{')?;
        while cursor.peek()? != b'}' {
            let key = cursor.value()?;
            cursor.take(b':')?;
            let value = cursor.value()?;
            if serde_json::from_str::<String>(self.text(&key)).ok()? == name {
                found = Some(value);
            }
            cursor.comma();
        }
        found
    }

    /// The values of an array.
    pub fn elements(self, array: &Range<usize>) -> Option<Vec<Range<usize>>> {
        let mut cursor = Cursor { bytes: self.0.as_bytes(), at: array.start };
        let mut elements = Vec::new();
        cursor.take(b'[')?;
        while cursor.peek()? != b']' {
            elements.push(cursor.value()?);
            cursor.comma();
        }
        Some(elements)
    }
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    /// The next byte that is no white space.
    fn peek(&mut self) -> Option<u8> {
        while matches!(self.bytes.get(self.at)?, b' ' | b'\t' | b'\n' | b'\r') {
            self.at += 1;
        }
        self.bytes.get(self.at).copied()
    }

    fn take(&mut self, byte: u8) -> Option<()> {
        (self.peek()? == byte).then(|| self.at += 1)
    }

    fn comma(&mut self) {
        let _ = self.take(b',');
    }

    fn value(&mut self) -> Option<Range<usize>> {
        let first = self.peek()?;
        let start = self.at;
        match first {
            b'"' => self.string()?,
            b'{' | b'[' => self.nested()?,
            b',' | b':' | b'}' | b']' => return None,
            _ => {
                let ends = |byte: &u8| matches!(byte, b',' | b':' | b'}' | b']' | b' ' | b'\t' | b'\n' | b'\r');
                let rest = &self.bytes[self.at..];
                self.at += rest.iter().position(ends).unwrap_or(rest.len());
            }
        }
        Some(start..self.at)
    }

    fn string(&mut self) -> Option<()> {
        self.at += 1;
        loop {
            match self.bytes.get(self.at)? {
                b'"' => break,
                b'\\' => self.at += 2,
                _ => self.at += 1,
            }
        }
        self.at += 1;
        Some(())
    }

    fn nested(&mut self) -> Option<()> {
        let mut depth = 0u32;
        loop {
            match self.bytes.get(self.at)? {
                b'"' => {
                    self.string()?;
                    continue;
                }
                b'{' | b'[' => depth += 1,
                b'}' | b']' => depth -= 1,
                _ => {}
            }
            self.at += 1;
            if depth == 0 {
                return Some(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_and_elements_are_found_byte_for_byte() {
        let text =
            " {\"a\" : 1, \"b\\\"c\":[ {\"x\":\"]}\\\\\"} ,\t2.50e1,null ],\"a\":{\"a\":[]}, \"\\u0062\": \"é\" }\n";
        let json = Json::new(text).unwrap();
        let root = json.root();
        let member = |name| json.member(&root, name).map(|span| json.text(&span));
        assert_eq!(member("a"), Some("{\"a\":[]}"), "the last of two");
        assert_eq!(member("b"), Some("\"é\""), "names are compared as they are meant");
        assert_eq!(member("c"), None);
        let list = json.member(&root, "b\"c").unwrap();
        let elements: Vec<_> = json.elements(&list).unwrap().iter().map(|span| json.text(span)).collect();
        assert_eq!(elements, ["{\"x\":\"]}\\\\\"}", "2.50e1", "null"]);
    }

    #[test]
    fn what_is_of_another_kind_gives_nothing() {
        for text in ["[]", "\"{}\"", "1", "null", "{}", "[ ]"] {
            let json = Json::new(text).unwrap();
            assert_eq!(json.member(&json.root(), "a"), None, "{text}");
        }
        let json = Json::new("{}").unwrap();
        assert_eq!(json.elements(&json.root()), None);
        let json = Json::new(" [ ] ").unwrap();
        assert_eq!(json.elements(&json.root()), Some(vec![]));
        for text in ["", "{", "{\"a\"}", "[1,]", "{} x", "nonsense"] {
            assert!(Json::new(text).is_err(), "{text}");
        }
    }

    proptest::proptest! {
        /// Cut anywhere, no text makes it panic.
        #[test]
        fn no_text_is_too_odd(text in "[\\[\\]{}\",:\\\\a1 ]{0,40}") {
            let json = Json(&text);
            let whole = 0..text.len();
            let _ = (json.member(&whole, "a"), json.elements(&whole));
        }
    }
}
