//! Plots as SVG that needs nothing from outside: bars by path, and measurements over sizes with their fits.

use std::fmt::Write;

use crate::figures::{Summary, short};

const WIDTH: f64 = 560.0;
const LEFT: f64 = 110.0;
const RIGHT: f64 = 130.0;
const TOP: f64 = 48.0;
const ROW: f64 = 30.0;
const AREA: f64 = 240.0;
const FONT: &str = "font-family=\"DejaVu Sans, Verdana, Arial, sans-serif\"";

/// One bar per row: name and value, with the spread of the rounds as a whisker.
pub fn bars(title: &str, note: &str, rows: &[(&str, Summary)]) -> String {
    let height = TOP + ROW * rows.len() as f64 + 12.0;
    let mut svg = open(title, note, height);
    let most = rows.iter().map(|(_, row)| row.max).fold(f64::MIN_POSITIVE, f64::max);
    let x = |value: f64| LEFT + (WIDTH - LEFT - RIGHT) * (value / most).clamp(0.0, 1.0);
    for (number, (name, row)) in rows.iter().enumerate() {
        let top = TOP + ROW * number as f64;
        let (middle, end) = (top + ROW / 2.0, x(row.median));
        let _ = writeln!(svg, "{}", text(LEFT - 8.0, middle + 4.0, "end", 12, name));
        let _ = writeln!(
            svg,
            "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"/>",
            top + 5.0,
            end - LEFT,
            ROW - 10.0,
            colour(name)
        );
        if row.max > row.min {
            let _ = writeln!(svg, "{}", line((x(row.min), middle), (x(row.max), middle), "#222", 1.5));
            for at in [row.min, row.max] {
                let _ = writeln!(svg, "{}", line((x(at), middle - 4.0), (x(at), middle + 4.0), "#222", 1.5));
            }
        }
        let _ = writeln!(svg, "{}", text(x(row.max.max(row.median)) + 8.0, middle + 4.0, "start", 12, &row.text()));
    }
    svg + "</svg>\n"
}

/// Something measured over sizes: dots, and a line through what was fitted.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    pub name: String,
    pub dots: Vec<(f64, f64)>,
    pub line: Vec<(f64, f64)>,
}

/// Curves over one axis. Both axes begin at 0.
pub fn curves(title: &str, (across, up): (&str, &str), all: &[Curve]) -> String {
    let bottom = TOP + AREA;
    let mut svg = open(title, up, bottom + 48.0);
    let of = |pick: fn(&(f64, f64)) -> f64| {
        let points = all.iter().flat_map(|curve| curve.dots.iter().chain(&curve.line));
        round_up(points.map(pick).fold(f64::MIN_POSITIVE, f64::max))
    };
    let (most_x, most_y) = (of(|point| point.0), of(|point| point.1));
    let left = 70.0;
    let place =
        |(x, y): (f64, f64)| (left + (WIDTH - left - RIGHT) * x / most_x, bottom - AREA * (y / most_y).clamp(0.0, 1.0));
    for step in 0..=4 {
        let share = f64::from(step) / 4.0;
        let (x, _) = place((most_x * share, 0.0));
        let (_, y) = place((0.0, most_y * share));
        let (end, _) = place((most_x, 0.0));
        let _ = writeln!(svg, "{}", line((left, y), (end, y), "#ddd", 1.0));
        let _ = writeln!(svg, "{}", text(left - 6.0, y + 4.0, "end", 11, &short(most_y * share)));
        let _ = writeln!(svg, "{}", text(x, bottom + 16.0, "middle", 11, &plain(most_x * share)));
    }
    let (end, _) = place((most_x, 0.0));
    let _ = writeln!(svg, "{}", text((left + end) / 2.0, bottom + 36.0, "middle", 12, across));
    for (number, curve) in all.iter().enumerate() {
        let colour = colour(&curve.name);
        let mut path = String::new();
        for (step, point) in curve.line.iter().enumerate() {
            let (x, y) = place(*point);
            let _ = write!(path, "{}{x:.1} {y:.1} ", if step == 0 { "M" } else { "L" });
        }
        if !path.is_empty() {
            let _ = writeln!(svg, "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>");
        }
        for dot in &curve.dots {
            let (x, y) = place(*dot);
            let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"/>");
        }
        let y = TOP + 12.0 + 20.0 * number as f64;
        let x = WIDTH - RIGHT + 14.0;
        let _ = writeln!(svg, "<circle cx=\"{x}\" cy=\"{y}\" r=\"5\" fill=\"{colour}\"/>");
        let _ = writeln!(svg, "{}", text(x + 12.0, y + 4.0, "start", 12, &curve.name));
    }
    svg + "</svg>\n"
}

fn open(title: &str, note: &str, height: f64) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    let _ = writeln!(svg, "<title>{}</title>", escape(title));
    let _ = writeln!(svg, "{}", text(14.0, 20.0, "start", 14, title));
    let _ = writeln!(svg, "{}", text(14.0, 37.0, "start", 11, note));
    svg
}

fn text(x: f64, y: f64, anchor: &str, size: u32, words: &str) -> String {
    let words = escape(words);
    format!(
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"#222\" {FONT}>{words}</text>"
    )
}

fn line(from: (f64, f64), to: (f64, f64), colour: &str, width: f64) -> String {
    let ((a, b), (c, d)) = (from, to);
    format!(
        "<line x1=\"{a:.1}\" y1=\"{b:.1}\" x2=\"{c:.1}\" y2=\"{d:.1}\" stroke=\"{colour}\" stroke-width=\"{width}\"/>"
    )
}

/// For text in SVG and HTML.
pub fn escape(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn colour(name: &str) -> &'static str {
    match name.split(' ').next().unwrap_or_default() {
        "direct" => "#9aa0a6",
        "relay" => "#c9b458",
        "sidecar" | "sidecars" => "#c8553d",
        "hbone_envoy" => "#e09f3e",
        "mesh" => "#2a6f97",
        _ => "#6d597a",
    }
}

/// The next number whose quarters are easy to read.
fn round_up(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 4.0, 6.0, 8.0, 10.0];
    steps.into_iter().map(|step| step * power).find(|round| *round >= value).unwrap_or(value)
}

/// Sizes are whole numbers.
fn plain(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value}") } else { short(value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_long_as_its_value_and_text_is_escaped() {
        let one = |value| Summary { median: value, min: value, max: value };
        let svg = bars("CPU < all", "", &[("relay", one(10.0)), ("mesh", one(5.0))]);
        let widths: Vec<f64> = svg
            .lines()
            .filter(|line| line.starts_with("<rect x="))
            .map(|line| {
                line.split("width=\"").nth(1).and_then(|rest| rest.split('"').next()?.parse().ok()).expect("a width")
            })
            .collect();
        assert_eq!(widths, [WIDTH - LEFT - RIGHT, (WIDTH - LEFT - RIGHT) / 2.0]);
        assert!(svg.contains("CPU &lt; all") && !svg.contains("CPU < all"));
    }

    #[test]
    fn axes_end_at_round_numbers() {
        assert_eq!([0.0013, 7.0, 12.0, 100.0, 350.0].map(round_up), [0.002, 8.0, 20.0, 100.0, 400.0]);
    }

    #[test]
    fn every_measurement_has_its_dot_within_the_picture() {
        let dots = vec![(0.0, 7.0), (100.0, 9.5)];
        let svg = curves("memory", ("pods", "MB"), &[Curve { name: "mesh".into(), line: dots.clone(), dots }]);
        let heights: Vec<f64> = svg
            .lines()
            .filter(|line| line.contains("r=\"3.5\""))
            .map(|line| {
                line.split("cy=\"").nth(1).and_then(|rest| rest.split('"').next()?.parse().ok()).expect("a place")
            })
            .collect();
        assert_eq!(heights.len(), 2);
        assert!(heights.iter().all(|y| (TOP..=TOP + AREA).contains(y)), "{heights:?}");
        assert!(heights[1] < heights[0], "more is higher up: {heights:?}");
    }
}
