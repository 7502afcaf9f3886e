//! Times as text: RFC 3339 in UTC, without a calendar library.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// Appends `2026-03-01T10:11:12.123456Z`.
pub fn write_micros(out: &mut String, time: SystemTime) {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    write_date_time(out, since.as_secs() as i64);
    out.push('.');
    write_digits(out, i64::from(since.subsec_micros()), 100_000);
    out.push('Z');
}

/// `2026-03-01T10:11:12Z` of seconds since 1970, which may be negative.
pub fn rfc3339(unix_seconds: i64) -> String {
    let mut text = String::with_capacity(20);
    write_date_time(&mut text, unix_seconds);
    text.push('Z');
    text
}

/// The Gregorian calendar, counted in years that start in March, so that the leap day is the last.
fn write_date_time(out: &mut String, unix_seconds: i64) {
    let (days, second) = (unix_seconds.div_euclid(86_400), unix_seconds.rem_euclid(86_400));
    let days = days + 719_468;
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let _ = write!(out, "{year:04}");
    for (mark, number) in [('-', month), ('-', day), ('T', second / 3600), (':', second / 60 % 60), (':', second % 60)]
    {
        out.push(mark);
        write_digits(out, number, 10);
    }
}

/// All digits down from the one that stands for `first`.
fn write_digits(out: &mut String, number: i64, mut first: i64) {
    while first > 0 {
        out.push(char::from(b'0' + (number / first % 10) as u8));
        first /= 10;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn known_moments_have_their_known_names() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (4_102_444_800, "2100-01-01T00:00:00Z"),
            (-1, "1969-12-31T23:59:59Z"),
        ] {
            assert_eq!(rfc3339(seconds), text);
        }
    }

    #[test]
    fn log_time_has_six_digits_of_a_second() {
        let mut text = String::new();
        write_micros(&mut text, UNIX_EPOCH + Duration::from_micros(1_700_000_000_000_042));
        assert_eq!(text, "2023-11-14T22:13:20.000042Z");
    }
}
