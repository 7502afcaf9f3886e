//! The page: what was measured on, the marks, the plots, the bill, all values.

use std::fmt::Write;

use super::plot::escape;
use crate::bill::{Cluster, Model, Need};
use crate::figures::{Figures, Summary, negotiated_text, short};
use crate::machine;
use crate::marks::{Judged, judge};
use crate::paths::Path;
use crate::scale::{Scale, fit_text};

pub fn page(figures: &Figures, scale: &Scale, svgs: &[&str], model: Option<&Model>, cluster: &Cluster) -> String {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Understory: measured</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
         <h1>Understory: measured beside sidecars</h1>\n<p>{}</p>\n",
        escape(&machine::line())
    );
    page.push_str(PATHS);
    for (path, agreed) in &figures.negotiated {
        let _ = writeln!(page, "<p>TLS of {path}: {}.</p>", escape(&negotiated_text(agreed)));
    }
    marks(&mut page, figures);
    if let Some(model) = model {
        bill(&mut page, model, cluster);
    }
    let _ =
        writeln!(page, "<h2>Plots</h2>\n<p>Bars are medians; whiskers go from the lowest to the highest round.</p>");
    let _ = writeln!(page, "<div class=\"plots\">\n{}</div>", svgs.concat());
    if !scale.is_empty() {
        let _ =
            writeln!(page, "<h2>Scale model</h2>\n<p>Least squares over what was measured at several sizes.</p>\n<ul>");
        for (path, name, series) in scale.iter() {
            let _ = writeln!(page, "<li><b>{path}</b> {name}: {}</li>", escape(&fit_text(series)));
        }
        page.push_str("</ul>\n");
    }
    values(&mut page, figures);
    page + "</body>\n</html>\n"
}

fn marks(page: &mut String, figures: &Figures) {
    page.push_str(
        "<h2>The mesh and its marks</h2>\n<table>\n<tr><th>figure</th><th>mesh</th><th>÷ relay</th>\
         <th>÷ hbone_envoy</th><th>÷ sidecar</th><th>must</th><th>aim</th></tr>\n",
    );
    for name in figures.names() {
        let Some(mesh) = figures.median_of(Path::Mesh.name(), name) else { continue };
        let ratio = |to| figures.ratio(name, to).map_or(String::new(), |ratio| format!("{ratio:.2}"));
        let (musts, aim) = judge(figures, name);
        let musts: Vec<String> = musts.iter().map(mark).collect();
        let _ = writeln!(
            page,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(&figures.titled(name)),
            short(mesh),
            ratio(Path::Relay),
            ratio(Path::HboneEnvoy),
            ratio(Path::Sidecar),
            musts.join("<br>"),
            aim.as_ref().map_or(String::new(), mark)
        );
    }
    page.push_str("</table>\n");
}

fn mark(judged: &Judged) -> String {
    let (class, verdict) = match judged.met {
        Some(true) => ("met", "met"),
        Some(false) => ("missed", "missed"),
        None => ("unknown", "no verdict"),
    };
    format!("<span class=\"{class}\">{}: {verdict}</span>", escape(&judged.mark))
}

fn bill(page: &mut String, model: &Model, cluster: &Cluster) {
    let bill = model.bill(cluster);
    page.push_str(
        "<h2>The bill</h2>\n<p>By the scale model below. Prices are assumptions: put in yours.</p>\n<form>\n",
    );
    let fields = [
        ("nodes", "nodes", f64::from(cluster.nodes)),
        ("pods", "pods", f64::from(cluster.pods)),
        ("rps", "requests per second", cluster.rps),
        ("services", "services", f64::from(cluster.services)),
        ("connections", "connections per pod", cluster.connections_per_pod),
        ("vcpu", "a vCPU for a month", cluster.vcpu_price),
        ("gb", "a GB for a month", cluster.gb_price),
    ];
    for (id, label, value) in fields {
        let _ = writeln!(
            page,
            "<label>{label} <input id=\"{id}\" type=\"number\" min=\"0\" step=\"any\" value=\"{value}\"></label>"
        );
    }
    page.push_str("</form>\n<table>\n<tr><th></th><th>busy cores</th><th>memory [GB]</th><th>cost a month</th></tr>\n");
    for (id, need) in [("sidecars", bill.sidecars), ("mesh", bill.mesh), ("saved", bill.saving())] {
        let Need { cores, gigabytes, cost } = need;
        let cells = [cores, gigabytes, cost].map(|value| format!("<td>{}</td>", short(value))).concat();
        let _ = writeln!(page, "<tr id=\"row-{id}\"><td>{id}</td>{cells}</tr>");
    }
    let _ = writeln!(page, "</table>\n<p>Without the control planes, which both need.</p>");
    let _ = writeln!(page, "<script>\nconst m = {};\n{SCRIPT}</script>", model.to_json());
}

fn values(page: &mut String, figures: &Figures) {
    page.push_str(
        "<h2>All values</h2>\n<p>Median, and (lowest–highest) of the rounds.</p>\n<table>\n<tr><th>figure</th>",
    );
    let paths = Path::ALL.map(Path::name);
    paths.iter().for_each(|path| _ = write!(page, "<th>{path}</th>"));
    page.push_str("</tr>\n");
    for name in figures.names() {
        let _ = write!(page, "<tr><td>{}</td>", escape(&figures.titled(name)));
        for path in paths {
            let cell = figures.summary(path, name).map_or(String::new(), Summary::text);
            let _ = write!(page, "<td>{cell}</td>");
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table>\n");
}

const STYLE: &str = "
body { font: 15px/1.45 'DejaVu Sans', Verdana, Arial, sans-serif; color: #222; background: #fff; max-width: 1200px; margin: 24px auto; padding: 0 16px }
table { border-collapse: collapse; font-size: 13px; margin: 8px 0 }
th, td { border-bottom: 1px solid #ddd; padding: 4px 10px; text-align: right; vertical-align: top }
th:first-child, td:first-child { text-align: left }
.met { color: #19692c } .missed { color: #a3201d; font-weight: bold } .unknown { color: #777 }
.plots { display: flex; flex-wrap: wrap; gap: 12px }
.plots svg { border: 1px solid #e4e4e4; max-width: 100% }
label { display: inline-block; margin: 4px 14px 4px 0 } input { width: 8em; font: inherit }
";

const PATHS: &str = "<p>Paths from a client pod on one node to a server pod on another, measured by turns on one machine: \
<b>direct</b>, no proxy; <b>relay</b>, two plain TCP relays in the proxies' place: the yardstick; <b>sidecar</b>, an Envoy \
in either pod, mutual TLS, HTTP for requests and TCP for the rest, no telemetry, no access log; <b>hbone_envoy</b>, Envoy as \
HBONE client and server, without capture; <b>mesh</b>, ours, with capture, policies, metrics and access log. Client and \
server share the cores with the proxies, so CPU, memory and ratios mean more than rates.</p>\n";

/// The same sums as `Model::bill`.
const SCRIPT: &str = "
const value = id => Number(document.getElementById(id).value) || 0;
function bill() {
  const nodes = value('nodes'), pods = value('pods'), rps = value('rps'), services = value('services');
  const open = pods * value('connections');
  const need = (cores, mb) => [cores, mb / 1000, cores * value('vcpu') + mb / 1000 * value('gb')];
  const sidecars = need(
    pods * m.sidecar_cores + rps * m.sidecar_cores_per_rps,
    nodes * m.sidecar_program_mb + pods * (m.sidecar_mb + m.sidecar_mb_per_service * services + m.sidecar_mb_per_endpoint * pods)
      + open * m.sidecar_mb_per_connection);
  const mesh = need(
    nodes * m.node_cores + rps * m.node_cores_per_rps,
    nodes * (m.node_mb + m.node_mb_per_workload * pods + m.node_mb_per_service * services)
      + pods * m.node_mb_per_pod + open * m.node_mb_per_connection);
  const rows = { sidecars, mesh, saved: sidecars.map((v, i) => v - mesh[i]) };
  for (const [name, cells] of Object.entries(rows)) {
    cells.forEach((v, i) => {
      document.getElementById('row-' + name).cells[i + 1].textContent = Number(v.toPrecision(3)).toLocaleString('en');
    });
  }
}
document.querySelectorAll('input').forEach(input => input.addEventListener('input', bill));
";
