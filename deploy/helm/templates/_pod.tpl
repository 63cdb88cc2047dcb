{{/*
The template of a component's pods. Takes:
  root, component, pool (engines)
  values: the component's own
  args: of its container, before the settings
  secrets: keys of the Secret that it reads
  mounts: of runs, models, data, huggingFace
  waits: whether it needs NATS to start
*/}}
{{- define "penstock.pod" -}}
{{- $root := .root }}
{{- $values := .values }}
{{- $component := .component }}
{{- $ports := get (include "penstock.ports" . | fromYaml) .component }}
{{- $gpus := int ($values.gpus | default 0) }}
metadata:
  labels:
    {{- include "penstock.selector" . | nindent 4 }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $hasRecipe := and $root.Values.recipe.text (ne .component "nats") }}
  {{- if or $values.podAnnotations $hasRecipe }}
  annotations:
    {{- if $hasRecipe }}
    penstock/recipe: {{ $root.Values.recipe.text | sha256sum | trunc 16 | quote }}
    {{- end }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
spec:
  {{- if eq .component "trainer" }}
  restartPolicy: Never
  {{- end }}
  automountServiceAccountToken: false
  # Otherwise a Service called penstock would set variables that begin as settings do.
  enableServiceLinks: false
  # The pause container then reaps what a process leaves, and a signal ends a process that is still starting.
  shareProcessNamespace: true
  terminationGracePeriodSeconds: {{ $values.graceSeconds }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ $root.Values.user }}
    runAsGroup: {{ $root.Values.user }}
    fsGroup: {{ $root.Values.user }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if has .component (list "reward" "router" "rollout" "worker") }}
  {{- $selector := include "penstock.selector" . }}
  {{- with $root.Values.spreadOver }}
  topologySpreadConstraints:
    {{- range . }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- $selector | nindent 10 }}
      matchLabelKeys: [pod-template-hash]
    {{- end }}
  {{- end }}
  {{- end }}
  {{- if .waits }}
  initContainers:
    # A process gives NATS ten seconds, and a trainer that gives up ends its Job.
    - name: wait-for-nats
      image: {{ include "penstock.image" . }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [python3, -c]
      args:
        - |
          import socket, sys, time
          while True:
              for server in sys.argv[1:]:
                  host, _, port = server.partition(":")
                  try:
                      socket.create_connection((host, int(port)), 5).close()
                      sys.exit()
                  except OSError as error:
                      print(f"waiting for NATS at {server}: {error}", flush=True)
              time.sleep(2)
        {{- include "penstock.servers" $root | nindent 8 }}
      securityContext:
        {{- include "penstock.confined" . | nindent 8 }}
      resources:
        requests: {cpu: 10m, memory: 64Mi}
        limits: {memory: 64Mi}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "penstock.image" . }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- with .args }}
      args:
        {{- range . }}
        - {{ . | quote }}
        {{- end }}
      {{- end }}
      env:
        {{- range .secrets }}
        - name: PENSTOCK_{{ . | upper | replace "-" "_" }}_FILE
          value: /var/run/penstock/secrets/{{ . }}
        {{- end }}
        {{- if has .component (list "rollout" "trainer") }}
        # Others reach this pod by its address: its name does not resolve.
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- end }}
        {{- if ne .component "nats" }}
        - name: OMP_NUM_THREADS
          value: {{ $values.threads | default 1 | quote }}
        - name: OMP_WAIT_POLICY
          value: PASSIVE
        - name: TOKENIZERS_PARALLELISM
          value: "false"
        {{- end }}
        {{- if has "huggingFace" .mounts }}
        - name: HF_HOME
          value: /hf
        - name: HF_HUB_OFFLINE
          value: {{ ternary "1" "0" $root.Values.huggingFace.offline | quote }}
        {{- if $root.Values.huggingFace.tokenSecret }}
        - name: HF_TOKEN_PATH
          value: /var/run/penstock/hf/token
        {{- end }}
        {{- end }}
        {{- if $gpus }}
        # Kernels that were compiled stay there while the pod lives.
        - name: HOME
          value: /cache
        {{- end }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- range $name, $port := $ports }}
        - name: {{ $name }}
          containerPort: {{ $port }}
        {{- end }}
      {{- $check := include "penstock.check" (dict "root" $root "component" .component "ports" $ports) }}
      {{- $timeout := ternary 5 10 (and (ne .component "nats") (not $root.Values.tls.secret)) }}
      startupProbe:
        {{- $check | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: {{ $timeout }}
        failureThreshold: {{ div (add ($values.startupSeconds | default 600) 4) 5 }}
      readinessProbe:
        {{- $check | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: {{ $timeout }}
        failureThreshold: 2
      # Five minutes, because a busy machine answers late; a process whose work has failed ends by itself.
      livenessProbe:
        {{- $check | nindent 8 }}
        periodSeconds: 30
        timeoutSeconds: {{ $timeout }}
        failureThreshold: 10
      securityContext:
        {{- include "penstock.confined" . | nindent 8 }}
      {{- $resources := deepCopy $values.resources }}
      {{- if $gpus }}
      {{- $_ := set $resources "limits" (set ($resources.limits | default dict) $values.gpuResource $gpus) }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if eq .component "nats" }}
        - {name: data, mountPath: /data}
        {{- end }}
        {{- if and $root.Values.recipe.text (ne .component "nats") }}
        - {name: recipe, mountPath: /etc/penstock, readOnly: true}
        {{- end }}
        {{- if .secrets }}
        - {name: secrets, mountPath: /var/run/penstock/secrets, readOnly: true}
        {{- end }}
        {{- if $root.Values.tls.secret }}
        - {name: tls, mountPath: /var/run/penstock/tls, readOnly: true}
        {{- end }}
        {{- if has "huggingFace" .mounts }}
        - {name: hf, mountPath: /hf{{ if and $root.Values.huggingFace.existingClaim $root.Values.huggingFace.offline }}, readOnly: true{{ end }}}
        {{- if $root.Values.huggingFace.tokenSecret }}
        - {name: hf-token, mountPath: /var/run/penstock/hf, readOnly: true}
        {{- end }}
        {{- end }}
        {{- if and (has "models" .mounts) $root.Values.models.existingClaim }}
        - {name: models, mountPath: /penstock/models, readOnly: true}
        {{- end }}
        {{- if and (has "data" .mounts) $root.Values.data.existingClaim }}
        - {name: datasets, mountPath: /penstock/data, readOnly: true}
        {{- end }}
        {{- if has "runs" .mounts }}
        - {name: runs, mountPath: /penstock/runs}
        {{- end }}
        {{- if $values.shm }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if $gpus }}
        - {name: cache, mountPath: /cache}
        {{- end }}
        {{- with $values.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      # nats-server's has a file with its token.
      emptyDir: {{ if eq .component "nats" }}{medium: Memory, sizeLimit: 1Mi}{{ else }}{}{{ end }}
    {{- if and $root.Values.recipe.text (ne .component "nats") }}
    - name: recipe
      configMap: {name: {{ include "penstock.name" $root }}-recipe}
    {{- end }}
    {{- if .secrets }}
    - name: secrets
      secret:
        secretName: {{ include "penstock.secret" $root }}
        defaultMode: 0440
        items:
          {{- range .secrets }}
          - {key: {{ . }}, path: {{ . }}}
          {{- end }}
    {{- end }}
    {{- with $root.Values.tls.secret }}
    - name: tls
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- if has "huggingFace" .mounts }}
    - name: hf
      {{- with $root.Values.huggingFace.existingClaim }}
      persistentVolumeClaim: {claimName: {{ . }}}
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- with $root.Values.huggingFace.tokenSecret }}
    - name: hf-token
      secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: token, path: token}]}
    {{- end }}
    {{- end }}
    {{- if and (has "models" .mounts) $root.Values.models.existingClaim }}
    - name: models
      persistentVolumeClaim: {claimName: {{ $root.Values.models.existingClaim }}, readOnly: true}
    {{- end }}
    {{- if and (has "data" .mounts) $root.Values.data.existingClaim }}
    - name: datasets
      persistentVolumeClaim: {claimName: {{ $root.Values.data.existingClaim }}, readOnly: true}
    {{- end }}
    {{- if has "runs" .mounts }}
    - name: runs
      persistentVolumeClaim:
        claimName: {{ $root.Values.runs.existingClaim | default (printf "%s-runs" (include "penstock.name" $root)) }}
    {{- end }}
    {{- with $values.shm }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ . }}}
    {{- end }}
    {{- if $gpus }}
    - name: cache
      emptyDir: {}
    {{- end }}
    {{- with $values.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* What no container may do. */}}
{{- define "penstock.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* How a component is asked whether it takes work. Takes root, component and its ports. */}}
{{- define "penstock.check" -}}
{{- $tls := .root.Values.tls }}
{{- if eq .component "nats" -}}
exec:
  command:
    - python3
    - -c
    - from urllib.request import ProxyHandler, build_opener;
      build_opener(ProxyHandler({})).open("http://127.0.0.1:8222/healthz", timeout=8)
{{- else if $tls.secret -}}
# The kubelet's own gRPC probe knows no TLS.
exec:
  command:
    - python3
    - -m
    - penstock.runtime.health
    - 127.0.0.1:{{ .ports.grpc }}
    - --tls-ca=/var/run/penstock/tls/ca.crt
    - --tls-server-name={{ $tls.serverName }}
    {{- if $tls.mutual }}
    - --tls-cert=/var/run/penstock/tls/tls.crt
    - --tls-key=/var/run/penstock/tls/tls.key
    {{- end }}
{{- else -}}
grpc: {port: {{ .ports.grpc }}}
{{- end -}}
{{- end }}

{{/* Sections and settings that several processes read. tests/integration/deploy compares them with the code. */}}
{{- define "penstock.shared" -}}
- bus
- run.name
- sampling
- rollout.context_length
- trace.max_gib
- trainer.float32_head
- trainer.router_replay
- trainer.weight_sync.stage_timeout_s
{{- end }}

{{/*
Arguments of a process, a JSON list. Takes:
  root
  place: of its settings in the values
  settings: its own list
  own: arguments of the chart's
  bus: whether it needs NATS
*/}}
{{- define "penstock.args" -}}
{{- $config := ternary "/etc/penstock/recipe.toml" .root.Values.recipe.shipped (ne .root.Values.recipe.text "") }}
{{- $args := list "--config" $config (printf "--run.name=%s" (include "penstock.run" .root)) }}
{{- if .bus }}
{{- $args = append $args (printf "--bus.url=%s" (include "penstock.bus" .root)) }}
{{- end }}
{{- $args = concat $args .own }}
{{- if .root.Values.tls.secret }}
{{- range $key, $file := dict "tls_cert" "tls.crt" "tls_key" "tls.key" "tls_ca" "ca.crt" }}
{{- $args = append $args (printf "--security.%s=/var/run/penstock/tls/%s" $key $file) }}
{{- end }}
{{- $args = append $args (printf "--security.tls_server_name=%s" .root.Values.tls.serverName) }}
{{- if .root.Values.tls.mutual }}
{{- $args = append $args "--security.mutual=true" }}
{{- end }}
{{- end }}
{{- range $setting := .settings }}
{{- $key := regexReplaceAll "=.*" $setting "." }}
{{- range include "penstock.shared" $ | fromYamlArray }}
{{- /* A table, as in a.b={c=1}, holds the setting a.b.c. */}}
{{- $shared := printf "%s." . }}
{{- if or (hasPrefix $shared $key) (hasPrefix $key $shared) }}
{{- fail (printf "%s.settings has %s, which other processes read, too; give it in `settings`, which all of them read" $.place $setting) }}
{{- end }}
{{- end }}
{{- end }}
{{- range concat (.root.Values.settings | default list) (.settings | default list) }}
{{- $args = append $args (printf "--%s" .) }}
{{- end }}
{{- if not .bus }}
{{- /* Settings and recipe are all processes', and some of those of the bus need its address. */}}
{{- $args = concat $args (list "--bus.url=" "--bus.replicas=1") }}
{{- end }}
{{- $args | toJson }}
{{- end }}
