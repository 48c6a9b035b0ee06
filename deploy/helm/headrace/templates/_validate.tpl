{{/* Settings that contradict each other, which a schema cannot express. One line per problem, with what to set; empty if there is none. */}}
{{- define "headrace.problems" -}}
{{- include "headrace.problems.names" . }}
{{ include "headrace.problems.gpus" . }}
{{ include "headrace.problems.storage" . }}
{{ include "headrace.problems.connections" . }}
{{ include "headrace.problems.scaling" . }}
{{ include "headrace.problems.amounts" . }}
{{ include "headrace.problems.env" . }}
{{- end -}}

{{- define "headrace.problems.names" -}}
{{- $name := include "headrace.fullname" . -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" $name) }}
{{ printf "the names of all Services would begin with %s, but such a name must begin with a letter and have only lower-case letters, digits and -: set fullnameOverride to a valid name" $name }}
{{- end }}
{{- if and (gt (int .Values.trainer.multiNode.nodes) 1) (gt (len $name) 39) }}
{{ printf "%s has more than 39 characters: with trainer.multiNode.nodes above 1, Kubernetes could not label the pods of %s-trainer-node: set fullnameOverride to a shorter name" $name $name }}
{{- end }}
{{- end -}}

{{- define "headrace.problems.gpus" -}}
{{- $values := .Values -}}
{{- $cpu := eq $values.images.flavour "cpu" -}}
{{- range $name := list "trainer" "generator" "rewarder" }}
{{- $gpus := int (index $values $name).gpus }}
{{- if and $cpu (gt $gpus 0) }}
{{ printf "%s.gpus is %d, but images.flavour is cpu: set %s.gpus to 0, or images.flavour to gpu" $name $gpus $name }}
{{- end }}
{{- if and (not $cpu) (eq $gpus 0) (ne $name "rewarder") }}
{{ printf "%s.gpus is 0, but images.flavour is gpu: give it a GPU, or set images.flavour to cpu for all of them" $name }}
{{- end }}
{{- end }}
{{- $args := $values.generator.engineArgs }}
{{- range $name, $_ := $args }}
{{- if contains "-" $name }}
{{ printf "generator.engineArgs.%s: engine arguments are written with _, as in Python: write %s" $name (replace "-" "_" $name) }}
{{- end }}
{{- end }}
{{- $gpus := int $values.generator.gpus }}
{{- $used := mul (int (default 1 (get $args "tensor_parallel_size"))) (int (default 1 (get $args "pipeline_parallel_size"))) (int (default 1 (get $args "data_parallel_size"))) }}
{{- if and (not $cpu) (gt $gpus 0) (ne (int $used) $gpus) }}
{{ printf "generator.gpus is %d, but generator.engineArgs makes vLLM use %d: the product of tensor_parallel_size, pipeline_parallel_size and data_parallel_size must be generator.gpus" $gpus (int $used) }}
{{- end }}
{{- if eq (toString (get $values.test.run "weight_transport")) "ipc" }}
test.run.weight_transport is ipc, which needs the trainer and its generator in one pod, but in this chart they are in different pods: set it to nccl, with a separate GPU for each, or to gloo
{{- end }}
{{- end -}}

{{- define "headrace.problems.storage" -}}
{{- $values := .Values -}}
{{- $nodes := int $values.trainer.multiNode.nodes -}}
{{- if and (gt $nodes 1) (not $values.storage.runs.existingClaim) (ne $values.storage.runs.accessMode "ReadWriteMany") }}
{{ printf "trainer.multiNode.nodes is %d, so all nodes need the runs' directory: set storage.runs.accessMode to ReadWriteMany, or storage.runs.existingClaim to a claim with that mode" $nodes }}
{{- end }}
{{- if and (gt $nodes 1) (include "headrace.isOnOneNode" (list $values.storage.models $values.storage.uploads)) }}
{{ printf "trainer.multiNode.nodes is %d, so all nodes need the models: set storage.models.accessMode to ReadWriteMany, and if storage.models.existingClaim is set, to a claim with that mode (and so for storage.uploads)" $nodes }}
{{- end }}
{{- with $values.storage.models }}
{{- if and .enabled (eq .accessMode "ReadOnlyMany") (not .existingClaim) }}
storage.models.accessMode is ReadOnlyMany, and a new claim would stay empty: set storage.models.existingClaim to a claim with the models, or another accessMode
{{- end }}
{{- end }}
{{- range $key, $modules := dict "rewarder.rewardModules" $values.rewarder.rewardModules "sessions.toolModules" $values.sessions.toolModules }}
{{- if and $modules.configMap $modules.existingClaim }}
{{ printf "%s has both a configMap and an existingClaim: choose one" $key }}
{{- end }}
{{- end }}
{{- range $key, $claim := dict "storage.runs" $values.storage.runs "redis.persistence" $values.redis.persistence }}
{{- if and $claim.emptyDir $claim.existingClaim }}
{{ printf "%s has both emptyDir and existingClaim: choose one" $key }}
{{- end }}
{{- end }}
{{- if and (gt $nodes 1) $values.storage.runs.emptyDir }}
{{ printf "trainer.multiNode.nodes is %d, so all nodes need the runs' directory, but with storage.runs.emptyDir each pod has its own: set it to false" $nodes }}
{{- end }}
{{- end -}}

{{- define "headrace.problems.connections" -}}
{{- $values := .Values -}}
{{- if and (not $values.redis.bundled) (not $values.redis.external.host) }}
redis.bundled is false: set redis.external.host to the host of your Redis
{{- end }}
{{- if and $values.redis.bundled $values.redis.external.host }}
{{ printf "redis.external.host is %s, but redis.bundled is true, so runs would be in the chart's own Redis: set redis.bundled to false, or leave out redis.external.host" $values.redis.external.host }}
{{- end }}
{{- if and (not $values.redis.bundled) (not $values.secrets.existingSecret) }}
redis.bundled is false, so the chart does not know its passwords: set secrets.existingSecret to a Secret with them
{{- end }}
{{- if and $values.ingress.enabled (not $values.ingress.hosts) }}
ingress.enabled is true: name at least one host in ingress.hosts
{{- end }}
{{- if and $values.gateway.enabled (not $values.gateway.parentRefs) }}
gateway.enabled is true: name at least one Gateway in gateway.parentRefs
{{- end }}
{{- if eq (int $values.metrics.port) 8000 }}
metrics.port is 8000, which is the port of every service's HTTP API: set another port, such as 9090
{{- end }}
{{- end -}}

{{- define "headrace.problems.scaling" -}}
{{- $values := .Values -}}
{{- range $name := list "generator" "rewarder" "sessions" }}
{{- $scaling := (index $values $name).autoscaling }}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) }}
{{ printf "%s.autoscaling.minReplicas is %d, above maxReplicas, which is %d: lower minReplicas or raise maxReplicas" $name (int $scaling.minReplicas) (int $scaling.maxReplicas) }}
{{- end }}
{{- end }}
{{- end -}}
