//! The report of a run: one page that opens without a network, and its plots as SVG and PNG beside it.

mod page;
mod plot;

use std::fs;
use std::path::Path as FilePath;
use std::process::Command;

use anyhow::{Context, Result, bail};
use plot::Curve;

use crate::bill::{Bill, Cluster, Model};
use crate::figures::Figures;
use crate::paths::Path;
use crate::scale::Scale;

/// Makes PNG of SVG.
const CONVERTER: &str = "rsvg-convert";

/// A plot: its file's name without the ending, and what is in it.
struct Plot {
    name: String,
    svg: String,
}

/// What can be known before minutes are spent on measuring.
pub fn check(dir: &FilePath) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
    let found = Command::new(CONVERTER).arg("--version").output();
    if !found.is_ok_and(|output| output.status.success()) {
        bail!("{CONVERTER}, which makes the PNG files, is not on this machine: apt-get install librsvg2-bin");
    }
    Ok(())
}

/// Writes `report.html` and `<plot>.svg`, `<plot>.png`.
pub fn write(dir: &FilePath, figures: &Figures, scale: &Scale, cluster: &Cluster) -> Result<()> {
    let model = Model::of(scale);
    let mut plots = figure_plots(figures);
    plots.extend(scale_plots(scale));
    if let Ok(model) = &model {
        plots.push(bill_plot(model, cluster));
    }
    for plot in &plots {
        let (svg, png) = (dir.join(format!("{}.svg", plot.name)), dir.join(format!("{}.png", plot.name)));
        fs::write(&svg, &plot.svg).with_context(|| format!("write {}", svg.display()))?;
        let status = Command::new(CONVERTER).args(["--zoom", "2", "--output"]).arg(&png).arg(&svg).status();
        let status = status.with_context(|| format!("start {CONVERTER}"))?;
        if !status.success() {
            bail!("{CONVERTER} {} failed ({status})", svg.display());
        }
    }
    let svgs: Vec<&str> = plots.iter().map(|plot| plot.svg.as_str()).collect();
    let page = page::page(figures, scale, &svgs, model.as_ref().ok(), cluster);
    let path = dir.join("report.html");
    fs::write(&path, page).with_context(|| format!("write {}", path.display()))
}

fn figure_plots(figures: &Figures) -> Vec<Plot> {
    let plot = |(name, title, note): &(&str, &str, &str)| {
        let rows: Vec<_> = Path::ALL
            .map(Path::name)
            .into_iter()
            .filter_map(|path| Some((path, figures.summary(path, name)?)))
            .collect();
        (!rows.is_empty()).then(|| Plot { name: (*name).to_owned(), svg: plot::bars(title, note, &rows) })
    };
    PLOTTED.iter().filter_map(plot).collect()
}

fn scale_plots(scale: &Scale) -> Vec<Plot> {
    let mut plots = Vec::new();
    let mut add = |name: &str, title: &str, axes: (&str, &str), all: Vec<Curve>| {
        if !all.is_empty() {
            plots.push(Plot { name: format!("scale_{name}"), svg: plot::curves(title, axes, &all) });
        }
    };
    let of = |name: &'static str, part: usize| {
        let paths = Path::ALL.into_iter();
        paths.filter_map(move |path| curve(scale, path, name, part)).collect::<Vec<_>>()
    };
    add("cpu_by_rate", "CPU of all proxies of a path", ("requests/s", "busy cores"), of("cpu_by_rate", 0));
    let connections = of("memory_by_connections", 0);
    add(
        "memory_by_connections",
        "Memory of one proxy by open connections",
        ("connections", "MB of its own"),
        connections,
    );
    let mut pods = of("memory_by_pods", 0);
    if let (Some(sidecar), false) = (scale.fit(Path::Sidecar, "memory_by_services"), pods.is_empty()) {
        let line = [0.0, 100.0].map(|pods| (pods, pods * sidecar.base)).to_vec();
        pods.push(Curve { name: "sidecars".to_owned(), dots: Vec::new(), line });
    }
    add(
        "memory_by_pods",
        "Memory of a node's proxies by pods, without traffic",
        ("pods on the node", "MB of their own"),
        pods,
    );
    let mut workloads = of("memory_by_workloads", 0);
    workloads.extend(curve(scale, Path::Sidecar, "memory_by_services", 1));
    let axes =
        ("workloads that it is told of", "MB of its own; the mesh has one proxy per node, sidecars are one per pod");
    add("memory_by_workloads", "Memory of one proxy by the size of the cluster", axes, workloads);
    plots
}

/// A series over one of its parts, with what the fit says at the same sizes.
fn curve(scale: &Scale, path: Path, name: &str, part: usize) -> Option<Curve> {
    let series = scale.get(path, name)?;
    let fit = series.fit();
    let mut points = series.points.clone();
    points.sort_by(|(a, _), (b, _)| a[part].total_cmp(&b[part]));
    let dots = points.iter().map(|(size, value)| (size[part], *value)).collect();
    let line = fit.iter().flat_map(|fit| points.iter().map(|(size, _)| (size[part], fit.at(size)))).collect();
    Some(Curve { name: path.name().to_owned(), dots, line })
}

/// What a month costs by pods, with as many on a node, and as much of everything per pod, as in the cluster.
fn bill_plot(model: &Model, cluster: &Cluster) -> Plot {
    let bill = |share: f64| -> (f64, Bill) {
        let part = |number: u32| (f64::from(number) * share).ceil() as u32;
        let smaller = Cluster {
            nodes: part(cluster.nodes).max(1),
            pods: part(cluster.pods).max(1),
            services: part(cluster.services),
            rps: cluster.rps * share,
            ..cluster.clone()
        };
        (f64::from(smaller.pods), model.bill(&smaller))
    };
    let bills: Vec<(f64, Bill)> = (1..=10).map(|tenth| bill(f64::from(tenth) / 10.0)).collect();
    let curve = |name: &str, cost: fn(&Bill) -> f64| Curve {
        name: name.to_owned(),
        dots: Vec::new(),
        line: bills.iter().map(|(pods, bill)| (*pods, cost(bill))).collect(),
    };
    let all = [curve("sidecars", |bill| bill.sidecars.cost), curve("mesh", |bill| bill.mesh.cost)];
    let svg = plot::curves("What a month costs, with the assumed prices", ("pods", "cost a month"), &all);
    Plot { name: "bill".to_owned(), svg }
}

/// Figure, title, and which way is good.
const PLOTTED: &[(&str, &str, &str)] = &[
    ("cpu_ms_per_1k_saturation", "CPU per 1,000 requests at saturation", "CPU ms, both proxies; less is better"),
    ("cpu_ms_per_1k_at_1000rps", "CPU per 1,000 requests at 1,000/s", "CPU ms, both proxies; less is better"),
    ("p50_added_us_at_1000rps", "Latency added to a direct request, median", "µs at 1,000/s; less is better"),
    ("p99_added_us_at_1000rps", "Latency added to a direct request, 99th percentile", "µs at 1,000/s; less is better"),
    ("rps_saturation", "Requests per second, 64 connections", "more is better"),
    ("bulk_cpu_s_per_gb_1flow", "CPU per GB, one upload", "CPU s, both proxies; less is better"),
    ("bulk_cpu_s_per_gb_8flows", "CPU per GB, eight uploads", "CPU s, both proxies; less is better"),
    ("download_bulk_cpu_s_per_gb_1flow", "CPU per GB, one download", "CPU s, both proxies; less is better"),
    ("download_bulk_cpu_s_per_gb_8flows", "CPU per GB, eight downloads", "CPU s, both proxies; less is better"),
    ("bulk_gbit_8flows", "Throughput of eight uploads", "Gbit/s; more is better"),
    ("fairness_64flows_max_over_min", "64 flows: the largest share over the smallest", "1 is fair"),
    ("new_conn_cpu_ms_per_1k", "CPU per 1,000 new connections", "CPU ms, both proxies; less is better"),
    ("short_conn_per_s", "Short connections per second, the lowest 5 s", "more is better"),
    ("rss_idle_mb", "Memory of one idle proxy", "MB, PSS; sidecars: one per pod, others: one per node"),
    ("rss_per_idle_conn_kb", "Memory of one open connection, one proxy", "KB, PSS; less is better"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::Unit;

    fn scale() -> Scale {
        let mut scale = Scale::default();
        for size in [0.0, 50.0, 100.0] {
            for path in [Path::Sidecar, Path::Mesh] {
                scale.add(path, "cpu_by_rate", "cores", &["requests/s"], &[size], 0.001 * size);
                scale.add(path, "memory_by_connections", "MB", &["connections"], &[size], 8.0 + 0.01 * size);
            }
            for path in [Path::Sidecar, Path::Mesh] {
                scale.add(path, "program_memory", "MB", &[], &[], 9.0);
            }
            for name in ["memory_by_pods", "agent_memory_by_pods"] {
                scale.add(Path::Mesh, name, "MB", &["pods"], &[size], 8.0 + 0.02 * size);
            }
        }
        for (a, b) in [(0.0, 0.0), (10.0, 100.0), (10.0, 200.0), (30.0, 100.0)] {
            let per = ["workloads", "services"];
            scale.add(Path::Mesh, "memory_by_workloads", "MB", &per, &[b, a], 8.0 + 0.001 * b);
            let per = ["services", "endpoints"];
            scale.add(Path::Sidecar, "memory_by_services", "MB", &per, &[a, b], 25.0 + 0.1 * a);
        }
        scale
    }

    #[test]
    fn the_page_asks_nothing_of_the_network() {
        let mut figures = Figures::default();
        for (path, value) in [("relay", 10.0), ("mesh", 7.0)] {
            figures.put(path, "cpu_ms_per_1k_saturation", Unit::CpuMs, value);
        }
        let scale = scale();
        let cluster = Cluster::default();
        let model = Model::of(&scale).expect("all was measured");
        let mut plots = figure_plots(&figures);
        plots.extend(scale_plots(&scale));
        plots.push(bill_plot(&model, &cluster));
        let names: Vec<&str> = plots.iter().map(|plot| plot.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "cpu_ms_per_1k_saturation",
                "scale_cpu_by_rate",
                "scale_memory_by_connections",
                "scale_memory_by_pods",
                "scale_memory_by_workloads",
                "bill"
            ]
        );
        let svgs: Vec<&str> = plots.iter().map(|plot| plot.svg.as_str()).collect();
        let page = page::page(&figures, &scale, &svgs, Some(&model), &cluster);
        let outside = page.replace("http://www.w3.org/2000/svg", "");
        for reference in ["http:", "https:", "src=", "@import", "url(", "<link"] {
            assert!(!outside.contains(reference), "{reference} leads out of the page");
        }
        assert!(page.contains("≤ 0.8 × relay") && page.contains("cpu_ms_per_1k_saturation"));
    }
}
