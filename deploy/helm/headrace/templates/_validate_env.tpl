{{/* Variables that would be set twice, of which Kubernetes refuses some and takes the last of others. */}}
{{- define "headrace.problems.env" -}}
{{- $root := . -}}
{{- range $component := list "trainer" "generator" "rewarder" }}
{{- $ctx := dict "root" $root "component" $component "of" (index $root.Values $component) }}
{{- $setBy := dict }}
{{- range $entry := include (printf "headrace.env.%s" $component) $ctx | fromYamlArray }}
{{- $_ := set $setBy $entry.name "the chart itself" }}
{{- end }}
{{- range $key, $given := include "headrace.givenEnv" $ctx | fromJson }}
{{- range $name, $_ := $given }}
{{- if has $name (list "HEADRACE_API_KEY" "HEADRACE_INTERNAL_KEY" "HEADRACE_REDIS_PASSWORD" "HEADRACE_REDIS_URL") }}
{{ printf "%s.%s would be in the pod's description for all to read: put it into a Secret and name that in secrets.existingSecret" $key $name }}
{{- else if hasKey $setBy $name }}
{{ printf "%s.%s is set by %s too: leave it out here; what of the chart's own variables can be changed has a key in values.yaml" $key $name (get $setBy $name) }}
{{- end }}
{{- $_ := set $setBy $name $key }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
