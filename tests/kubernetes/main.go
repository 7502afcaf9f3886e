// Command kubernetes is etcd, kube-apiserver, kube-controller-manager, kubectl and helm in one file, which is built and
// kept much cheaper than five. Which one it is says the name that it is called by, or else its first argument.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"go.etcd.io/etcd/server/v3/etcdmain"
	helm "helm.sh/helm/v4/pkg/cmd"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
)

// Each runs on os.Args, whose first is its own name.
var programs = map[string]func() int{
	"etcd": func() int {
		etcdmain.Main(os.Args)
		return 0
	},
	"kube-apiserver":          func() int { return cli.Run(apiserver.NewAPIServerCommand()) },
	"kube-controller-manager": func() int { return cli.Run(controllers.NewControllerManagerCommand()) },
	"kubectl": func() int {
		return cli.Run(kubectl.NewDefaultKubectlCommandWithArgs(kubectl.KubectlOptions{
			Arguments: os.Args,
			IOStreams: genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr},
		}))
	},
	"helm": func() int {
		command, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
		if err == nil {
			err = command.Execute()
		}
		if err != nil {
			return 1
		}
		return 0
	},
}

func main() {
	name := filepath.Base(os.Args[0])
	run, found := programs[name]
	if !found && len(os.Args) > 1 {
		os.Args = os.Args[1:]
		name = os.Args[0]
		run, found = programs[name]
	}
	if !found {
		var names []string
		for name := range programs {
			names = append(names, name)
		}
		fmt.Fprintf(os.Stderr, "kubernetes: %q is none of %s\n", name, strings.Join(names, ", "))
		os.Exit(2)
	}
	os.Exit(run())
}
