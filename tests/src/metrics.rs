//! Reading of OpenMetrics text.

/// The samples of one scrape.
#[derive(Debug, Clone)]
pub struct Metrics(Vec<Sample>);

/// One sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    pub name: String,
    pub labels: Vec<(String, String)>,
    pub value: f64,
}

impl Metrics {
    pub(crate) fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
        Self(lines.map(|line| parse_line(line).unwrap_or_else(|| panic!("not OpenMetrics: {line:?}"))).collect())
    }

    pub fn samples(&self) -> &[Sample] {
        &self.0
    }

    /// Sum of all samples of this name that carry all the given labels. 0 if there is none.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let carries = |s: &&Sample| {
            let has = |(k, v): &(&str, &str)| s.labels.iter().any(|(key, value)| key == k && value == v);
            s.name == name && labels.iter().all(has)
        };
        self.0.iter().filter(carries).map(|s| s.value).sum()
    }
}

fn parse_line(line: &str) -> Option<Sample> {
    let Some((name, rest)) = line.split_once('{') else {
        let (name, value) = line.split_once(' ')?;
        return Some(Sample { name: name.to_owned(), labels: Vec::new(), value: number(value)? });
    };
    let mut labels = Vec::new();
    let mut rest = rest;
    loop {
        rest = rest.trim_start_matches(',');
        if let Some(value) = rest.strip_prefix('}') {
            return Some(Sample { name: name.to_owned(), labels, value: number(value)? });
        }
        let (key, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next()? {
                (i, '"') => break i,
                (_, '\\') => value.push(match chars.next()?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, c) => value.push(c),
            }
        };
        labels.push((key.to_owned(), value));
        rest = &after[end + 1..];
    }
}

/// The value; a timestamp or an exemplar may follow.
fn number(text: &str) -> Option<f64> {
    text.trim().split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_with_their_labels() {
        let metrics = Metrics::parse(
            "# TYPE a counter\na_total{x=\"1\",y=\"q\\\"}\\\\\"} 2 # {} 1\na_total{x=\"1\",y=\"z\"} 3\nb 1.5\n# EOF\n",
        );
        assert_eq!(metrics.sum("a_total", &[("x", "1")]), 5.0);
        assert_eq!(metrics.sum("a_total", &[("y", "q\"}\\")]), 2.0);
        assert_eq!(metrics.sum("b", &[]), 1.5);
        assert_eq!(metrics.sum("c", &[]), 0.0);
    }
}
