{{/* The prefix of every object's name: the label of a host's name, as those of Services have to be. */}}
{{- define "penstock.name" -}}
{{- if not (regexMatch "^[a-z]" .Release.Name) -}}
{{- fail (printf "release name '%s' begins with a digit, as no Service's may; choose one that begins with a letter" .Release.Name) -}}
{{- end -}}
{{- .Release.Name | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* The run's name. */}}
{{- define "penstock.run" -}}
{{- .Values.run | default (.Release.Name | replace "." "-") -}}
{{- end }}

{{/* What selects the pods of a component. Takes root and component. */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
penstock/pool: {{ . }}
{{- end }}
{{- end }}

{{/* Labels of an object. Takes root and component. */}}
{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* The ports of each component's containers, as the images set them. */}}
{{- define "penstock.ports" -}}
nats: {client: 4222}
reward: {grpc: 7002, http: 7003, metrics: 9400}
router: {grpc: 7001, http: 7080, metrics: 9400}
rollout: {grpc: 7010, metrics: 9400}
worker: {grpc: 7004, metrics: 9400}
trainer: {grpc: 7000, metrics: 9400}
{{- end }}

{{/* The image of a component. Takes root and component. */}}
{{- define "penstock.image" -}}
{{- with .root.Values.image.registry }}{{ . | trimSuffix "/" }}/{{ end -}}
penstock-{{ .component }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* The Secret with the tokens. */}}
{{- define "penstock.secret" -}}
{{- .Values.secrets.existing | default (printf "%s-secrets" (include "penstock.name" .)) -}}
{{- end }}

{{/* URL of NATS. */}}
{{- define "penstock.bus" -}}
{{- if .Values.nats.enabled -}}
nats://{{ include "penstock.name" . }}-nats:4222
{{- else -}}
{{- .Values.nats.url -}}
{{- end -}}
{{- end }}

{{/* Servers of NATS, a YAML list of host:port. */}}
{{- define "penstock.servers" -}}
{{- range splitList "," (include "penstock.bus" .) }}
{{- $host := (urlParse .).host }}
- {{ ternary $host (printf "%s:4222" $host) (contains ":" $host) | quote }}
{{- end }}
{{- end }}
