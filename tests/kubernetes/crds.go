//go:build tools

package main

// Only for their definitions of resources, which come as files.
import (
	_ "istio.io/api/networking/v1"
	_ "sigs.k8s.io/gateway-api/apis/v1"
)
