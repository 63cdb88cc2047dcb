{{/*
Comparisons between values, before anything is installed. Helm reads lists of settings, and knows the recipes that come
with Penstock; it does not read `recipe.text`, so processes compare their GPUs themselves (`penstock serve --gpus`).
*/}}

{{/*
The value of a setting of a process, without quotes; empty if `recipe.text` may give it. Takes:
  root
  settings: the process's own list
  key
  default: the value in recipes that come with Penstock
*/}}
{{- define "penstock.setting" -}}
{{- $value := ternary .default "" (empty .root.Values.recipe.text) }}
{{- $prefix := printf "%s=" .key }}
{{- range concat (.root.Values.settings | default list) (.settings | default list) }}
{{- if hasPrefix $prefix . }}
{{- $value = trimPrefix $prefix . | trim | trimAll "\"'" }}
{{- end }}
{{- end }}
{{- $value }}
{{- end }}

{{/*
Refuses a number of GPUs that is not the setting's. Takes:
  root
  place: of the number in the values
  gpus: the number
  settings: the process's own list
  key: the setting
*/}}
{{- define "penstock.requireGpus" -}}
{{- $used := include "penstock.setting" (dict "root" .root "settings" .settings "key" .key "default" "1") }}
{{- if and .gpus $used (ne $used (toString .gpus)) }}
{{- fail (printf "%s = %d, but %s = %s; they must be the same: add %s=%d to its `settings`, or give another number of GPUs" .place .gpus .key $used .key .gpus) }}
{{- end }}
{{- end }}

{{/*
The precision of a process's weights; empty if `recipe.text` may give it. Takes:
  root
  settings: the process's own list
  key: the setting of the precision
  onGpu: whether the process computes on a GPU
*/}}
{{- define "penstock.precision" -}}
{{- $given := include "penstock.setting" (dict "root" .root "settings" .settings "key" .key "default" "auto") }}
{{- if and (empty $given) (not (contains "dtype" .root.Values.recipe.text)) }}
{{- $given = "auto" }}
{{- end }}
{{- if eq $given "auto" }}{{ ternary "bfloat16" "float32" .onGpu }}{{ else }}{{ $given }}{{ end }}
{{- end }}

{{/*
Refuses engines that hold weights in another precision than the trainer pushes. Takes:
  root
  place: of the engines' GPUs in the values
  gpus: GPUs of an engine
  settings: the engines' own list
*/}}
{{- define "penstock.requireSamePrecision" -}}
{{- $trainer := .root.Values.trainer }}
{{- if $trainer.enabled }}
{{- $gpus := int ($trainer.gpus | default 0) }}
{{- $device := include "penstock.setting" (dict "root" .root "settings" $trainer.settings "key" "trainer.device" "default" "auto") }}
{{- $onGpu := and (gt $gpus 0) (ne $device "cpu") }}
{{- $held := include "penstock.precision" (dict "root" .root "settings" .settings "key" "rollout.dtype" "onGpu" (gt .gpus 0)) }}
{{- $pushed := include "penstock.precision" (dict "root" .root "settings" $trainer.settings "key" "trainer.dtype" "onGpu" $onGpu) }}
{{- if and $held $pushed (ne $held $pushed) }}
{{- fail (printf "%s = %d and trainer.gpus = %d: engines hold %s, and the trainer pushes %s, which they refuse; give GPUs to both or neither, or add rollout.dtype=%s and trainer.dtype=%s to `settings`" .place .gpus $gpus $held $pushed $held $held) }}
{{- end }}
{{- end }}
{{- end }}
