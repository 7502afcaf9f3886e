{{/* Does this release have a control plane of its own? Not empty if so. */}}
{{- define "understory.control" -}}
{{- if eq .Values.profile "standalone" }}true{{ end -}}
{{- end -}}

{{/* The image of all programs. */}}
{{- define "understory.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels of all objects; the argument is [root, name of the part]. */}}
{{- define "understory.labels" -}}
{{- $root := index . 0 -}}
app: {{ index . 1 }}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/part-of: understory
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{/* Labels of a part's pods, which are in no mesh themselves; the argument is [root, name, the part's values]. */}}
{{- define "understory.podLabels" -}}
{{- $own := fromYaml (include "understory.labels" (list (index . 0) (index . 1))) -}}
{{- $_ := set $own "istio.io/dataplane-mode" "none" -}}
{{- $_ := set $own "sidecar.istio.io/inject" "false" -}}
{{- toYaml (merge $own (index . 2).podLabels) -}}
{{- end -}}

{{/* Annotations of a part's pods; the argument is [root, metrics port, the part's values]. */}}
{{- define "understory.podAnnotations" -}}
{{- $root := index . 0 -}}
{{- $all := dict "sidecar.istio.io/inject" "false" -}}
{{- if $root.Values.metrics.annotations -}}
{{- $_ := set $all "prometheus.io/scrape" "true" -}}
{{- $_ := set $all "prometheus.io/port" (index . 1 | toString) -}}
{{- end -}}
{{- toYaml (merge (deepCopy (index . 2).podAnnotations) $all) -}}
{{- end -}}

{{/* Environment; the argument is [what the chart sets, what the user adds], and the user's counts. */}}
{{- define "understory.env" -}}
{{- $all := merge (deepCopy (index . 1)) (index . 0) -}}
{{- range $name, $value := $all }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end -}}
{{- end -}}

{{/* Where a part may run; the argument is its values. */}}
{{- define "understory.placement" -}}
priorityClassName: {{ .priorityClassName | quote }}
nodeSelector:
  {{- merge (dict "kubernetes.io/os" "linux") .nodeSelector | toYaml | nindent 2 }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "understory.imagePullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Where the proxies find discovery and certificates. */}}
{{- define "understory.xdsAddress" -}}
{{- if include "understory.control" . -}}
https://control.{{ .Release.Namespace }}.svc:15012
{{- else -}}
{{ .Values.istiod.address | default (printf "https://istiod.%s.svc:15012" .Release.Namespace) }}
{{- end -}}
{{- end -}}

{{- define "understory.caAddress" -}}
{{- $xds := include "understory.xdsAddress" . -}}
{{- if include "understory.control" . }}{{ $xds }}{{ else }}{{ .Values.istiod.caAddress | default $xds }}{{ end -}}
{{- end -}}

{{/* The CNI plugin's folders and whether it is installed, as YAML: what is not given is the platform's. */}}
{{- define "understory.cni" -}}
{{- $confDirs := dict "k3s" "/var/lib/rancher/k3s/agent/etc/cni/net.d" -}}
{{- $binDirs := dict "gke" "/home/kubernetes/bin" "k3s" "/var/lib/rancher/k3s/data/cni" "openshift" "/var/lib/cni/bin" -}}
{{- $platform := .Values.platform -}}
{{- with .Values.agent.cni -}}
enabled: {{ kindIs "invalid" .enabled | ternary (ne $platform "openshift") .enabled }}
confDir: {{ .confDir | default (get $confDirs $platform) | default "/etc/cni/net.d" }}
binDir: {{ .binDir | default (get $binDirs $platform) | default "/opt/cni/bin" }}
{{- end -}}
{{- end -}}
