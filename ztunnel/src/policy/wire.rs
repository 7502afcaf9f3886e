//! A policy as it comes over the wire, with a note of what this version does not know.
//!
//! Must never lose a field silently: a condition that is dropped widens an ALLOW.

use std::collections::BTreeSet;

use prost::bytes::Buf;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use prost::{DecodeError, Message};

use crate::proto::security;

/// A decoded policy.
#[derive(Debug, Clone, Default)]
pub struct Decoded {
    pub message: security::Authorization,
    /// The first field outside of all matches that is not known.
    pub(super) unknown: Option<String>,
    /// Rule, clause and match of those with fields that are not known.
    pub(super) unknown_matches: BTreeSet<(usize, usize, usize)>,
}

impl From<security::Authorization> for Decoded {
    fn from(message: security::Authorization) -> Self {
        Self { message, ..Self::default() }
    }
}

/// Reads a policy.
pub fn decode(bytes: &[u8]) -> Result<Decoded, DecodeError> {
    let mut decoded = Decoded::from(security::Authorization::decode(bytes)?);
    let (mut outside, mut inside) = (None, BTreeSet::new());
    let mut note = |place: &str, number: u32| {
        outside.get_or_insert_with(|| format!("{place} has field {number}, which this version does not know"));
    };
    let mut rule = 0;
    fields(bytes, |number, content| {
        match number {
            RULES => {
                let mut clause = 0;
                fields(content, |number, content| {
                    match number {
                        CLAUSES => {
                            let mut index = 0;
                            fields(content, |number, content| {
                                match number {
                                    MATCHES => {
                                        if !is_known(content)? {
                                            inside.insert((rule, clause, index));
                                        }
                                        index += 1;
                                    }
                                    other => note("a clause", other),
                                }
                                Ok(())
                            })?;
                            clause += 1;
                        }
                        other => note("a rule", other),
                    }
                    Ok(())
                })?;
                rule += 1;
            }
            1..=LAST_OF_POLICY => {}
            other => note("the policy", other),
        }
        Ok(())
    })?;
    (decoded.unknown, decoded.unknown_matches) = (outside, inside);
    Ok(decoded)
}

/// Whether all fields of a match are known, and those of their values.
fn is_known(one: &[u8]) -> Result<bool, DecodeError> {
    let mut known = true;
    fields(one, |number, content| {
        let last = match number {
            NAMESPACES..=NOT_PRINCIPALS => LAST_OF_TEXT,
            SOURCE_IPS..=NOT_DESTINATION_IPS => LAST_OF_ADDRESS,
            SERVICE_ACCOUNTS | NOT_SERVICE_ACCOUNTS => LAST_OF_ACCOUNT,
            // Ports are numbers, and what an extension says is not understood as a whole.
            DESTINATION_PORTS..=EXTENSIONS => return Ok(()),
            _ => {
                known = false;
                return Ok(());
            }
        };
        fields(content, |number, _| {
            known &= (1..=last).contains(&number);
            Ok(())
        })
    })?;
    Ok(known)
}

/// Shows each field of a message: its number and, for a message or text within, its content.
fn fields(mut bytes: &[u8], mut see: impl FnMut(u32, &[u8]) -> Result<(), DecodeError>) -> Result<(), DecodeError> {
    while bytes.has_remaining() {
        let (number, kind) = decode_key(&mut bytes)?;
        let start = bytes;
        skip_field(kind, number, &mut bytes, DecodeContext::default())?;
        let mut content = &start[..start.len() - bytes.len()];
        if kind == WireType::LengthDelimited {
            decode_varint(&mut content)?;
        } else {
            content = &[];
        }
        see(number, content)?;
    }
    Ok(())
}

// Numbers of `authorization.proto`.
const RULES: u32 = 5;
const LAST_OF_POLICY: u32 = 7;
const CLAUSES: u32 = 1;
const MATCHES: u32 = 2;
const NAMESPACES: u32 = 1;
const NOT_PRINCIPALS: u32 = 4;
const SOURCE_IPS: u32 = 5;
const NOT_DESTINATION_IPS: u32 = 8;
const DESTINATION_PORTS: u32 = 9;
const SERVICE_ACCOUNTS: u32 = 11;
const NOT_SERVICE_ACCOUNTS: u32 = 12;
const EXTENSIONS: u32 = 13;
const LAST_OF_TEXT: u32 = 4;
const LAST_OF_ADDRESS: u32 = 2;
const LAST_OF_ACCOUNT: u32 = 2;
