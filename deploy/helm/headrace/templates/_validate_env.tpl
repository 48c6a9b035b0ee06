{{/* Names of variables for secrets, and where each secret belongs. Takes the name of a service. */}}
{{- define "headrace.secretVariables" -}}
{{- $keys := "put it into a Secret and set secrets.existingSecret to its name" -}}
{{- $token := "put it into a Secret and set hub.tokenSecret to its name" -}}
{{- $bucket := "put a file of credentials into a Secret, set storage.objectStore.existingSecret to its name and AWS_SHARED_CREDENTIALS_FILE to the file's path" -}}
{{- if not (include "headrace.hasWeights" (dict "component" .)) -}}
{{- $bucket = printf "put a file of credentials into a Secret, mount it with %s.extraVolumes, and set AWS_SHARED_CREDENTIALS_FILE to the file's path" . -}}
{{- end -}}
{{- toJson (dict
      "HEADRACE_API_KEY" $keys "HEADRACE_INTERNAL_KEY" $keys "HEADRACE_REDIS_PASSWORD" $keys "HEADRACE_REDIS_URL" $keys
      "HF_TOKEN" $token "HUGGING_FACE_HUB_TOKEN" $token
      "AWS_SECRET_ACCESS_KEY" $bucket "AWS_SESSION_TOKEN" $bucket) -}}
{{- end -}}

{{/* Problems with variables: duplicates, of which Kubernetes refuses some and uses the last of others; and secrets in plain values. */}}
{{- define "headrace.problems.env" -}}
{{- $root := . -}}
{{- range $component := list "trainer" "generator" "rewarder" "sessions" }}
{{- $ctx := dict "root" $root "component" $component "of" (index $root.Values $component) }}
{{- $secrets := include "headrace.secretVariables" $component | fromJson }}
{{- $setBy := dict }}
{{- range $entry := include (printf "headrace.env.%s" $component) $ctx | fromYamlArray }}
{{- $_ := set $setBy $entry.name "the chart itself" }}
{{- end }}
{{- range $key, $given := include "headrace.givenEnv" $ctx | fromJson }}
{{- $reference := printf "put it into a Secret and name the Secret in %s.envFrom, or here in valueFrom.secretKeyRef" $component }}
{{- range $name, $value := $given }}
{{- $isPlain := kindIs "string" $value }}
{{- $where := get $secrets $name }}
{{- if and (not $where) $isPlain (regexMatch "(_API_KEY|_TOKEN|_PASSWORD|_SECRET|_SECRET_KEY|_ACCESS_KEY)$" $name) }}
{{- $where = $reference }}
{{- end }}
{{- if and $where (or $isPlain (hasPrefix "HEADRACE_" $name)) }}
{{ printf "%s.%s would be readable by everyone in the pod's description: %s" $key $name $where }}
{{- else if hasKey $setBy $name }}
{{ printf "%s.%s is also set by %s: leave it out here; the chart's own variables can be changed only by their keys in values.yaml" $key $name (get $setBy $name) }}
{{- end }}
{{- $_ := set $setBy $name $key }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
