{{/* Puts pods with training ranks on different nodes, in addition to the affinity from values. */}}
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

{{/* Whether trainer and generators share a claim that only one node can mount. */}}
{{- define "headrace.oneNodeHasModels" -}}
{{- $found := "" -}}
{{- range $claim := list .Values.storage.models .Values.storage.uploads -}}
{{- if and $claim.enabled (not $claim.existingClaim) (eq $claim.accessMode "ReadWriteOnce") -}}{{- $found = "true" -}}{{- end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{/* The affinity from values; with such a claim, also to the trainer's node. Takes a dict of root and of. */}}
{{- define "headrace.affinityToTrainer" -}}
{{- $affinity := deepCopy (default dict .of.affinity) -}}
{{- if include "headrace.oneNodeHasModels" .root -}}
{{- $labels := include "headrace.selector" (dict "root" .root "component" "trainer") | fromYaml -}}
{{- $beside := dict "labelSelector" (dict "matchLabels" $labels) "topologyKey" "kubernetes.io/hostname" -}}
{{- $pods := default dict $affinity.podAffinity -}}
{{- $required := append (default list $pods.requiredDuringSchedulingIgnoredDuringExecution) $beside -}}
{{- $_ := set $pods "requiredDuringSchedulingIgnoredDuringExecution" $required -}}
{{- $_ := set $affinity "podAffinity" $pods -}}
{{- end -}}
{{- with $affinity -}}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}
