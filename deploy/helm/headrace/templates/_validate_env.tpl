{{/* Names of variables for secrets, and where each secret belongs. Takes the name of a service. */}}
{{- define "headrace.secretVariables" -}}
{{- $keys := "put it into a Secret and name that in secrets.existingSecret" -}}
{{- $token := "put it into a Secret and name that in hub.tokenSecret" -}}
{{- $bucket := "put a file of credentials into a Secret, name that in storage.objectStore.existingSecret, and the file in AWS_SHARED_CREDENTIALS_FILE" -}}
{{- if eq . "rewarder" -}}
{{- $bucket = "put a file of credentials into a Secret, mount that with rewarder.extraVolumes, and name the file in AWS_SHARED_CREDENTIALS_FILE" -}}
{{- end -}}
{{- toJson (dict
      "HEADRACE_API_KEY" $keys "HEADRACE_INTERNAL_KEY" $keys "HEADRACE_REDIS_PASSWORD" $keys "HEADRACE_REDIS_URL" $keys
      "HF_TOKEN" $token "HUGGING_FACE_HUB_TOKEN" $token
      "AWS_SECRET_ACCESS_KEY" $bucket "AWS_SESSION_TOKEN" $bucket) -}}
{{- end -}}

{{/* Problems with variables: duplicates, of which Kubernetes refuses some and uses the last of others; and secrets in plain values. */}}
{{- define "headrace.problems.env" -}}
{{- $root := . -}}
{{- range $component := list "trainer" "generator" "rewarder" }}
{{- $ctx := dict "root" $root "component" $component "of" (index $root.Values $component) }}
{{- $secrets := include "headrace.secretVariables" $component | fromJson }}
{{- $setBy := dict }}
{{- range $entry := include (printf "headrace.env.%s" $component) $ctx | fromYamlArray }}
{{- $_ := set $setBy $entry.name "the chart itself" }}
{{- end }}
{{- range $key, $given := include "headrace.givenEnv" $ctx | fromJson }}
{{- $reference := printf "put it into a Secret and name that in %s.envFrom, or in valueFrom.secretKeyRef here" $component }}
{{- range $name, $value := $given }}
{{- $isPlain := kindIs "string" $value }}
{{- $where := get $secrets $name }}
{{- if and (not $where) $isPlain (regexMatch "(_API_KEY|_TOKEN|_PASSWORD|_SECRET|_SECRET_KEY|_ACCESS_KEY)$" $name) }}
{{- $where = $reference }}
{{- end }}
{{- if and $where (or $isPlain (hasPrefix "HEADRACE_" $name)) }}
{{ printf "%s.%s would be in the pod's description for all to read: %s" $key $name $where }}
{{- else if hasKey $setBy $name }}
{{ printf "%s.%s is set by %s too: leave it out here; what of the chart's own variables can be changed has a key in values.yaml" $key $name (get $setBy $name) }}
{{- end }}
{{- $_ := set $setBy $name $key }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
