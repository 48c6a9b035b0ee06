{{/* Training ranks of one run on different nodes; other wishes come from values. */}}
{{- define "headrace.trainerAffinity" -}}
{{- $affinity := deepCopy .of.affinity -}}
{{- if gt (int .of.multiNode.nodes) 1 -}}
{{- $labels := dict "app.kubernetes.io/instance" .root.Release.Name "headrace.io/ranks" "true" -}}
{{- $apart := dict "labelSelector" (dict "matchLabels" $labels) "topologyKey" "kubernetes.io/hostname" -}}
{{- $anti := default dict $affinity.podAntiAffinity -}}
{{- $required := append (default list $anti.requiredDuringSchedulingIgnoredDuringExecution) $apart -}}
{{- $_ := set $anti "requiredDuringSchedulingIgnoredDuringExecution" $required -}}
{{- $_ := set $affinity "podAntiAffinity" $anti -}}
{{- end -}}
{{- with $affinity -}}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}
