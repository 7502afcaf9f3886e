//! The small cluster that most tests want: a client, a server beside it and one on the other node, services.

use crate::cluster::{Pod, Service};
use crate::mesh::{Mesh, MeshOptions};
use crate::testbed::Testbed;

/// Namespace `shop` with three pods and their services. Nobody serves yet.
#[derive(Debug)]
pub struct Shop {
    /// On the first node.
    pub client: Pod,
    /// On the first node too.
    pub near: Pod,
    /// On the second node.
    pub far: Pod,
    /// Port 80 leads to `near`'s port 8080 by number.
    pub near_service: Service,
    /// Port 80 leads to `far`'s port 8080 by name.
    pub far_service: Service,
    // Last, so that it goes last.
    pub tb: Testbed,
}

impl Shop {
    /// All three pods are in the mesh.
    pub fn in_mesh() -> Self {
        Self::in_mesh_with(MeshOptions::default())
    }

    /// As [`Shop::in_mesh`], with other settings of the mesh.
    pub fn in_mesh_with(options: MeshOptions) -> Self {
        let shop = Self::outside_mesh_with(options);
        shop.enrol();
        shop
    }

    /// The mesh runs, but the namespace is not in it.
    pub fn outside_mesh() -> Self {
        Self::outside_mesh_with(MeshOptions::default())
    }

    pub fn outside_mesh_with(options: MeshOptions) -> Self {
        let shop = Self::without_mesh();
        shop.tb.start_mesh_with(options);
        shop
    }

    /// No mesh runs.
    pub fn without_mesh() -> Self {
        let tb = Testbed::new();
        let client = tb.pod("shop/client").service_account("client").start();
        let near = tb.pod("shop/near").service_account("near").port("tcp", 8080).start();
        let far = tb.pod("shop/far").service_account("far").port("tcp", 8080).on(tb.node(1)).start();
        let near_service = tb.service("shop/near").port(80, 8080).create();
        let far_service = tb.service("shop/far").port(80, "tcp").create();
        Self { client, near, far, near_service, far_service, tb }
    }

    /// Labels the namespace and waits until all three pods are in the mesh.
    pub fn enrol(&self) {
        self.tb.namespace("shop").enrol();
        self.mesh().wait_in_mesh(&self.pods());
    }

    /// Removes the label and waits until all three pods are out.
    pub fn unenrol(&self) {
        self.tb.namespace("shop").unenrol();
        self.mesh().wait_out_of_mesh(&self.pods());
    }

    pub fn pods(&self) -> [&Pod; 3] {
        [&self.client, &self.near, &self.far]
    }

    pub fn mesh(&self) -> &Mesh {
        self.tb.mesh()
    }
}
