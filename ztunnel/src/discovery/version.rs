//! The version of a resource as the server calls it: text, told back as it came.

use std::fmt;

/// The hashes that our control plane (16 hexadecimal digits) and istiod (decimal) use need no memory of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Version {
    Hex(u64),
    Decimal(u64),
    Text(Box<str>),
}

impl From<&str> for Version {
    fn from(text: &str) -> Self {
        let hex = u64::from_str_radix(text, 16).map(Self::Hex);
        let decimal = text.parse().map(Self::Decimal);
        let numbers = [hex, decimal].into_iter().flatten();
        // Digits, but not those that the number would be written with, are text.
        numbers.into_iter().find(|number| number.to_string() == text).unwrap_or_else(|| Self::Text(text.into()))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hex(number) => write!(f, "{number:016x}"),
            Self::Decimal(number) => write!(f, "{number}"),
            Self::Text(text) => f.write_str(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hashes_are_numbers_and_what_only_resembles_them_is_text() {
        for (text, version) in [
            ("00000000000000ff", Version::Hex(255)),
            ("18446744073709551615", Version::Decimal(u64::MAX)),
            ("0", Version::Decimal(0)),
            ("1000000000000001", Version::Hex(0x1000_0000_0000_0001)),
        ] {
            assert_eq!(Version::from(text), version);
        }
        for text in ["", "007", "+1", "00000000000000FF", "+000000000000001", "18446744073709551616", "ff", "v1"] {
            assert_eq!(Version::from(text), Version::Text(text.into()));
        }
    }

    proptest! {
        #[test]
        fn a_version_is_told_back_as_it_came(text in "[0-9a-f]{0,20}|.*", number: u64) {
            for text in [text, number.to_string(), format!("{number:016x}")] {
                prop_assert_eq!(Version::from(&*text).to_string(), text);
            }
        }
    }
}
