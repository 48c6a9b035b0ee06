{{/* The affinity from values. Also puts pods with training ranks on different nodes, and the trainer, if possible, on the node where
other pods keep a claim that only one node can mount: on another, it would wait for the claim for ever. */}}
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
{{- $components := list -}}
{{- if eq .component "trainer" -}}{{- $components = include "headrace.onTrainersNode" .root | fromYamlArray -}}{{- end -}}
{{- if $components -}}
{{- $labels := omit (include "headrace.selector" . | fromYaml) "app.kubernetes.io/component" -}}
{{- $one := dict "key" "app.kubernetes.io/component" "operator" "In" "values" $components -}}
{{- $beside := dict "labelSelector" (dict "matchLabels" $labels "matchExpressions" (list $one)) "topologyKey" "kubernetes.io/hostname" -}}
{{- $pods := default dict $affinity.podAffinity -}}
{{- $preferred := append (default list $pods.preferredDuringSchedulingIgnoredDuringExecution) (dict "weight" 100 "podAffinityTerm" $beside) -}}
{{- $_ := set $pods "preferredDuringSchedulingIgnoredDuringExecution" $preferred -}}
{{- $_ := set $affinity "podAffinity" $pods -}}
{{- end -}}
{{- with $affinity -}}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* The components that share with the trainer a claim that only one node can mount, as a YAML list. Takes the root. */}}
{{- define "headrace.onTrainersNode" -}}
{{- $storage := .Values.storage -}}
{{- $found := list -}}
{{- if include "headrace.isOnOneNode" (list $storage.models $storage.uploads) -}}{{- $found = append $found "generator" -}}{{- end -}}
{{- if include "headrace.isOnOneNode" (list $storage.code) -}}{{- $found = concat $found (list "rewarder" "sessions") -}}{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* Whether only one node can mount a claim that others share with the trainer. Takes a list of the claims' values. */}}
{{- define "headrace.isOnOneNode" -}}
{{- $found := "" -}}
{{- range $claim := . -}}
{{- if and $claim.enabled (eq $claim.accessMode "ReadWriteOnce") -}}{{- $found = "true" -}}{{- end -}}
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
