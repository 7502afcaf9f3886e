//! What a cluster of a given size needs for sidecars and for the mesh, by the scale model, and what that costs.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::figures::short;
use crate::paths::Path;
use crate::scale::Scale;

/// A cluster, and prices.
#[derive(Debug, Clone, clap::Args)]
pub struct Cluster {
    /// Nodes
    #[arg(long, default_value_t = Self::default().nodes, value_parser = clap::value_parser!(u32).range(1..))]
    pub nodes: u32,
    /// Pods of the mesh
    #[arg(long, default_value_t = Self::default().pods, value_parser = clap::value_parser!(u32).range(1..))]
    pub pods: u32,
    /// Requests per second between pods, of the whole cluster
    #[arg(long, default_value_t = Self::default().rps, value_parser = positive)]
    pub rps: f64,
    /// Services; every pod is an endpoint of one
    #[arg(long, default_value_t = Self::default().services)]
    pub services: u32,
    /// Open connections at each pod, in both directions together
    #[arg(long, default_value_t = Self::default().connections_per_pod, value_parser = positive)]
    pub connections_per_pod: f64,
    /// Price of one vCPU for a month; an assumption that yours should replace
    #[arg(long, default_value_t = Self::default().vcpu_price, value_parser = positive)]
    pub vcpu_price: f64,
    /// Price of one GB of memory for a month; likewise
    #[arg(long, default_value_t = Self::default().gb_price, value_parser = positive)]
    pub gb_price: f64,
}

/// What one way to run a mesh needs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Need {
    /// Busy cores, on average.
    pub cores: f64,
    pub gigabytes: f64,
    /// For a month.
    pub cost: f64,
}

/// For sidecars and for the mesh.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bill {
    pub sidecars: Need,
    pub mesh: Need,
}

/// The terms of the model, each as measured: memory in MB, CPU in cores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Model {
    /// What all sidecars of a node share.
    pub sidecar_program_mb: f64,
    pub sidecar_mb: f64,
    pub sidecar_mb_per_service: f64,
    pub sidecar_mb_per_endpoint: f64,
    pub sidecar_mb_per_connection: f64,
    /// Of one sidecar without traffic.
    pub sidecar_cores: f64,
    /// Of both sidecars on the way of a request.
    pub sidecar_cores_per_rps: f64,
    /// Of one node's proxy and agent, with the program that they share.
    pub node_mb: f64,
    pub node_mb_per_pod: f64,
    pub node_mb_per_workload: f64,
    pub node_mb_per_service: f64,
    pub node_mb_per_connection: f64,
    pub node_cores: f64,
    /// Of both nodes on the way of a request.
    pub node_cores_per_rps: f64,
}

impl Model {
    /// What is missing, if something is.
    pub fn of(scale: &Scale) -> Result<Self, String> {
        let fit = |path: Path, name: &str| {
            scale.fit(path, name).ok_or_else(|| format!("{} of {} was not measured at enough sizes", name, path.name()))
        };
        let services = fit(Path::Sidecar, "memory_by_services")?;
        let (pods, agent) = (fit(Path::Mesh, "memory_by_pods")?, fit(Path::Mesh, "agent_memory_by_pods")?);
        let workloads = fit(Path::Mesh, "memory_by_workloads")?;
        let (sidecar_cpu, mesh_cpu) = (fit(Path::Sidecar, "cpu_by_rate")?, fit(Path::Mesh, "cpu_by_rate")?);
        // Noise must not make anything cheaper than free.
        let least = |value: f64| value.max(0.0);
        Ok(Self {
            sidecar_program_mb: fit(Path::Sidecar, "program_memory")?.base,
            sidecar_mb: services.base,
            sidecar_mb_per_service: least(services.slopes[0]),
            sidecar_mb_per_endpoint: least(services.slopes[1]),
            sidecar_mb_per_connection: least(fit(Path::Sidecar, "memory_by_connections")?.slopes[0]),
            sidecar_cores: least(sidecar_cpu.base / 2.0),
            sidecar_cores_per_rps: least(sidecar_cpu.slopes[0]),
            node_mb: pods.base + agent.base + fit(Path::Mesh, "program_memory")?.base,
            node_mb_per_pod: least(pods.slopes[0]) + least(agent.slopes[0]),
            node_mb_per_workload: least(workloads.slopes[0]),
            node_mb_per_service: least(workloads.slopes[1]),
            node_mb_per_connection: least(fit(Path::Mesh, "memory_by_connections")?.slopes[0]),
            node_cores: least(mesh_cpu.base / 2.0),
            node_cores_per_rps: least(mesh_cpu.slopes[0]),
        })
    }

    pub fn bill(&self, cluster: &Cluster) -> Bill {
        let (nodes, pods) = (f64::from(cluster.nodes), f64::from(cluster.pods));
        let services = f64::from(cluster.services);
        let connections = pods * cluster.connections_per_pod;
        // Every sidecar is told of every service and of all pods behind them.
        let of_one_sidecar =
            self.sidecar_mb + self.sidecar_mb_per_service * services + self.sidecar_mb_per_endpoint * pods;
        let of_one_node = self.node_mb + self.node_mb_per_workload * pods + self.node_mb_per_service * services;
        let need = |cores: f64, megabytes: f64| {
            let gigabytes = megabytes / 1000.0;
            Need { cores, gigabytes, cost: cores * cluster.vcpu_price + gigabytes * cluster.gb_price }
        };
        Bill {
            sidecars: need(
                pods * self.sidecar_cores + cluster.rps * self.sidecar_cores_per_rps,
                nodes * self.sidecar_program_mb + pods * of_one_sidecar + connections * self.sidecar_mb_per_connection,
            ),
            mesh: need(
                nodes * self.node_cores + cluster.rps * self.node_cores_per_rps,
                nodes * of_one_node + pods * self.node_mb_per_pod + connections * self.node_mb_per_connection,
            ),
        }
    }

    /// For the page's own arithmetic, and for whoever reads the file.
    pub fn to_json(self) -> Value {
        json!({
            "sidecar_program_mb": self.sidecar_program_mb,
            "sidecar_mb": self.sidecar_mb,
            "sidecar_mb_per_service": self.sidecar_mb_per_service,
            "sidecar_mb_per_endpoint": self.sidecar_mb_per_endpoint,
            "sidecar_mb_per_connection": self.sidecar_mb_per_connection,
            "sidecar_cores": self.sidecar_cores,
            "sidecar_cores_per_rps": self.sidecar_cores_per_rps,
            "node_mb": self.node_mb,
            "node_mb_per_pod": self.node_mb_per_pod,
            "node_mb_per_workload": self.node_mb_per_workload,
            "node_mb_per_service": self.node_mb_per_service,
            "node_mb_per_connection": self.node_mb_per_connection,
            "node_cores": self.node_cores,
            "node_cores_per_rps": self.node_cores_per_rps,
        })
    }
}

impl Bill {
    /// The sidecars' over the mesh's.
    pub fn saving(&self) -> Need {
        let Self { sidecars, mesh } = self;
        Need {
            cores: sidecars.cores - mesh.cores,
            gigabytes: sidecars.gigabytes - mesh.gigabytes,
            cost: sidecars.cost - mesh.cost,
        }
    }

    /// For the terminal.
    pub fn text(&self, cluster: &Cluster) -> String {
        let mut text = format!(
            "{} nodes, {} pods, {} requests/s, {} services, {} connections per pod; {} a month for a vCPU, {} for a GB\n",
            cluster.nodes,
            cluster.pods,
            cluster.rps,
            cluster.services,
            cluster.connections_per_pod,
            cluster.vcpu_price,
            cluster.gb_price,
        );
        let _ = writeln!(text, "{:<10} {:>12} {:>12} {:>14}", "", "busy cores", "memory [GB]", "cost a month");
        for (name, need) in [("sidecars", self.sidecars), ("mesh", self.mesh), ("saved", self.saving())] {
            let _ = writeln!(
                text,
                "{name:<10} {:>12} {:>12} {:>14}",
                short(need.cores),
                short(need.gigabytes),
                short(need.cost)
            );
        }
        text.push_str("Without the control planes, which both need.\n");
        text
    }
}

impl Default for Cluster {
    fn default() -> Self {
        Self {
            nodes: 100,
            pods: 3000,
            rps: 20_000.0,
            services: 300,
            connections_per_pod: 20.0,
            vcpu_price: 23.0,
            gb_price: 3.0,
        }
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("a number that is not negative is expected".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: Model = Model {
        sidecar_program_mb: 50.0,
        sidecar_mb: 20.0,
        sidecar_mb_per_service: 0.1,
        sidecar_mb_per_endpoint: 0.001,
        sidecar_mb_per_connection: 0.05,
        sidecar_cores: 0.001,
        sidecar_cores_per_rps: 0.0003,
        node_mb: 20.0,
        node_mb_per_pod: 0.02,
        node_mb_per_workload: 0.0004,
        node_mb_per_service: 0.002,
        node_mb_per_connection: 0.002,
        node_cores: 0.002,
        node_cores_per_rps: 0.00006,
    };

    #[test]
    fn a_bill_adds_up() {
        let cluster = Cluster {
            nodes: 10,
            pods: 1000,
            rps: 5000.0,
            services: 100,
            connections_per_pod: 20.0,
            vcpu_price: 20.0,
            gb_price: 2.0,
        };
        let Bill { sidecars, mesh } = MODEL.bill(&cluster);
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} is not {b}");
        // 1,000 × 0.001 + 5,000 × 0.0003
        near(sidecars.cores, 2.5);
        // 10 × 50 + 1,000 × (20 + 100 × 0.1 + 1,000 × 0.001) + 20,000 × 0.05 MB
        near(sidecars.gigabytes, 32.5);
        near(sidecars.cost, 2.5 * 20.0 + 32.5 * 2.0);
        // 10 × 0.002 + 5,000 × 0.00006
        near(mesh.cores, 0.32);
        // 10 × (20 + 1,000 × 0.0004 + 100 × 0.002) + 1,000 × 0.02 + 20,000 × 0.002 MB
        near(mesh.gigabytes, 0.266);
    }

    #[test]
    fn what_was_not_measured_is_named() {
        let error = Model::of(&Scale::default()).expect_err("nothing was measured");
        assert!(error.contains("memory_by_services of sidecar"), "{error}");
    }
}
