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

{{/* Whether only one node can mount a claim that others share with the trainer. Takes a list of the claims' values. */}}
{{- define "headrace.isOnOneNode" -}}
{{- $found := "" -}}
{{- range $claim := . -}}
{{- if and $claim.enabled (not $claim.existingClaim) (eq $claim.accessMode "ReadWriteOnce") -}}{{- $found = "true" -}}{{- end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{/* The affinity from values; with such a claim, also to the trainer's node. Takes a dict of root, component and of. */}}
{{- define "headrace.affinityToTrainer" -}}
{{- $affinity := deepCopy (default dict .of.affinity) -}}
{{- $storage := .root.Values.storage -}}
{{- $shared := ternary (list $storage.code) (list $storage.models $storage.uploads) (has .component (list "rewarder" "sessions")) -}}
{{- if include "headrace.isOnOneNode" $shared -}}
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
