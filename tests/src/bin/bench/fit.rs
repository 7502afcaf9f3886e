//! Least squares: what a thing costs by its size, from measurements at several sizes, and how far they are from that.

use serde_json::{Value, json};

/// Measurements of one quantity at several sizes. A size may have several parts.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// What the parts of a size count: `pods`, say.
    pub per: Vec<String>,
    /// Of what was measured.
    pub unit: String,
    /// The fit goes through what was measured at size 0, as where the rest is no straight line: extrapolated, its base
    /// would be an invention.
    pub anchored: bool,
    pub points: Vec<(Vec<f64>, f64)>,
}

/// `value = base + Σ slope × part`.
#[derive(Debug, Clone, PartialEq)]
pub struct Fit {
    pub base: f64,
    pub slopes: Vec<f64>,
    /// Root of the mean squared distance of the measurements from the fit, in the unit of the values.
    pub error: f64,
}

impl Series {
    pub fn new(unit: &str, per: &[&str]) -> Self {
        Self {
            per: per.iter().map(|&part| part.to_owned()).collect(),
            unit: unit.to_owned(),
            anchored: false,
            points: Vec::new(),
        }
    }

    /// One whose fit goes through what was measured at size 0.
    pub fn anchored(unit: &str, per: &[&str]) -> Self {
        Self { anchored: true, ..Self::new(unit, per) }
    }

    pub fn add(&mut self, size: &[f64], value: f64) {
        assert_eq!(size.len(), self.per.len(), "a size has a number for each of {:?}", self.per);
        self.points.push((size.to_vec(), value));
    }

    /// Nothing if the sizes are too few, or do not tell their parts apart.
    pub fn fit(&self) -> Option<Fit> {
        let anchor = match self.anchored {
            true => Some(self.points.iter().find(|(size, _)| size.iter().all(|part| *part == 0.0))?.1),
            false => None,
        };
        let unknowns = self.per.len() + usize::from(anchor.is_none());
        if self.points.len() < unknowns {
            return None;
        }
        // Sizes may be numbers of very different magnitude: each part is scaled to its largest.
        let scale: Vec<f64> = (0..self.per.len())
            .map(|part| self.points.iter().map(|(size, _)| size[part].abs()).fold(0.0, f64::max))
            .collect();
        if scale.contains(&0.0) {
            return None;
        }
        let row = |size: &[f64]| -> Vec<f64> {
            let constant = anchor.is_none().then_some(1.0);
            constant.into_iter().chain(size.iter().zip(&scale).map(|(part, scale)| part / scale)).collect()
        };
        let fixed = anchor.unwrap_or(0.0);
        // The normal equations, with the right side as the last column.
        let mut equations = vec![vec![0.0; unknowns + 1]; unknowns];
        for (size, value) in &self.points {
            let row = row(size);
            let value = value - fixed;
            for (equation, factor) in equations.iter_mut().zip(&row) {
                for (cell, other) in equation.iter_mut().zip(row.iter().chain([&value])) {
                    *cell += factor * other;
                }
            }
        }
        let solved = solve(equations)?;
        let squares = self.points.iter().map(|(size, value)| {
            let fitted: f64 = row(size).iter().zip(&solved).map(|(factor, solved)| factor * solved).sum();
            (value - fixed - fitted).powi(2)
        });
        let error = (squares.sum::<f64>() / self.points.len() as f64).sqrt();
        let (base, slopes) = match anchor {
            Some(base) => (base, &solved[..]),
            None => (solved[0], &solved[1..]),
        };
        Some(Fit { base, slopes: slopes.iter().zip(&scale).map(|(slope, scale)| slope / scale).collect(), error })
    }

    pub fn to_json(&self) -> Value {
        let points: Vec<Value> = self.points.iter().map(|(size, value)| json!([size, value])).collect();
        let mut all = json!({ "unit": self.unit, "per": self.per, "anchored": self.anchored, "points": points });
        if let Some(fit) = self.fit() {
            all["fit"] = json!({ "base": fit.base, "slopes": fit.slopes, "error": fit.error });
        }
        all
    }

    pub fn from_json(value: &Value) -> Option<Self> {
        let per = value["per"].as_array()?.iter().map(|part| Some(part.as_str()?.to_owned())).collect::<Option<_>>()?;
        let point = |point: &Value| {
            let size = point[0].as_array()?.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>()?;
            Some((size, point[1].as_f64()?))
        };
        let points = value["points"].as_array()?.iter().map(point).collect::<Option<Vec<_>>>()?;
        let anchored = value["anchored"].as_bool()?;
        let all = Self { per, unit: value["unit"].as_str()?.to_owned(), anchored, points };
        all.points.iter().all(|(size, _)| size.len() == all.per.len()).then_some(all)
    }
}

impl Fit {
    pub fn at(&self, size: &[f64]) -> f64 {
        self.base + self.slopes.iter().zip(size).map(|(slope, part)| slope * part).sum::<f64>()
    }
}

/// Gauss with the largest pivot; nothing if the equations do not determine the unknowns.
fn solve(mut equations: Vec<Vec<f64>>) -> Option<Vec<f64>> {
    let unknowns = equations.len();
    for column in 0..unknowns {
        let best =
            (column..unknowns).max_by(|a, b| equations[*a][column].abs().total_cmp(&equations[*b][column].abs()))?;
        equations.swap(column, best);
        let pivot = equations[column].clone();
        if pivot[column].abs() < 1e-9 {
            return None;
        }
        for (number, equation) in equations.iter_mut().enumerate() {
            let factor = equation[column] / pivot[column];
            if number != column {
                equation.iter_mut().zip(&pivot).for_each(|(cell, above)| *cell -= factor * above);
            }
        }
    }
    Some(equations.iter().enumerate().map(|(number, equation)| equation[unknowns] / equation[number]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-6 * b.abs().max(1.0)
    }

    #[test]
    fn a_line_is_found_and_its_error_is_zero() {
        let mut series = Series::new("KB", &["pods"]);
        for pods in [0.0, 25.0, 50.0, 100.0] {
            series.add(&[pods], 7000.0 + 12.5 * pods);
        }
        let fit = series.fit().expect("a fit");
        assert!(near(fit.base, 7000.0) && near(fit.slopes[0], 12.5) && fit.error < 1e-6, "{fit:?}");
        assert!(near(fit.at(&[200.0]), 9500.0));
    }

    #[test]
    fn the_error_is_the_usual_distance_of_the_measurements() {
        let mut series = Series::new("KB", &["pods"]);
        // One above and one below at each size: the line goes between them.
        for (pods, value) in [(0.0, 9.0), (0.0, 11.0), (10.0, 19.0), (10.0, 21.0)] {
            series.add(&[pods], value);
        }
        let fit = series.fit().expect("a fit");
        assert!(near(fit.base, 10.0) && near(fit.slopes[0], 1.0) && near(fit.error, 1.0), "{fit:?}");
    }

    #[test]
    fn two_parts_of_very_different_size_are_told_apart() {
        let mut series = Series::new("MB", &["workloads", "services"]);
        for (workloads, services) in [(0.0, 0.0), (100_000.0, 10.0), (100_000.0, 20.0), (30_000.0, 3.0)] {
            series.add(&[workloads, services], 5.0 + 0.0004 * workloads + 0.3 * services);
        }
        let fit = series.fit().expect("a fit");
        assert!(near(fit.base, 5.0) && near(fit.slopes[0], 0.0004) && near(fit.slopes[1], 0.3), "{fit:?}");
    }

    #[test]
    fn an_anchored_line_goes_through_what_was_measured_at_nothing() {
        let mut series = Series::anchored("cores", &["requests/s"]);
        // The first requests are dearer than the later ones.
        for (rate, cores) in [(0.0, 0.5), (1.0, 3.5), (2.0, 4.5)] {
            series.add(&[rate], cores);
        }
        let fit = series.fit().expect("a fit");
        // (1 × 3 + 2 × 4) ÷ (1 + 4)
        assert!(near(fit.base, 0.5) && near(fit.slopes[0], 2.2), "{fit:?}");
        assert!(near(fit.error, ((0.8_f64.powi(2) + 0.4_f64.powi(2)) / 3.0).sqrt()), "{fit:?}");
        series.points.remove(0);
        assert_eq!(series.fit(), None, "nothing was measured at nothing");
    }

    #[test]
    fn what_cannot_be_told_apart_has_no_fit() {
        let mut series = Series::new("MB", &["workloads", "services"]);
        for number in [0.0, 1.0, 2.0, 3.0] {
            series.add(&[10.0 * number, number], number);
        }
        assert_eq!(series.fit(), None, "one is always ten times the other");
        let mut one = Series::new("MB", &["pods"]);
        one.add(&[1.0], 1.0);
        assert_eq!(one.fit(), None);
    }

    #[test]
    fn a_series_survives_the_file() {
        let mut series = Series::new("MB", &["pods"]);
        series.add(&[1.0], 2.0);
        series.add(&[2.0], 4.5);
        assert_eq!(Series::from_json(&series.to_json()), Some(series));
        assert_eq!(
            Series::from_json(&json!({ "unit": "MB", "per": ["pods"], "anchored": false, "points": [[[1, 2], 3]] })),
            None
        );
    }
}
