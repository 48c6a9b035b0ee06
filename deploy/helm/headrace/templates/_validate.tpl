{{/* What no schema can say: settings that contradict each other. */}}
{{- define "headrace.validate" -}}
{{- $values := .Values -}}
{{- $cpu := eq $values.images.flavour "cpu" -}}
{{- range $name := list "trainer" "generator" "rewarder" -}}
{{- $gpus := int (index $values $name).gpus -}}
{{- if and $cpu (gt $gpus 0) -}}
{{- fail (printf "%s.gpus is %d, but images.flavour is cpu: set %s.gpus to 0, or images.flavour to gpu" $name $gpus $name) -}}
{{- end -}}
{{- if and (not $cpu) (eq $gpus 0) (ne $name "rewarder") -}}
{{- fail (printf "%s.gpus is 0, but images.flavour is gpu: give it a GPU, or set images.flavour to cpu for all of them" $name) -}}
{{- end -}}
{{- end -}}
{{- $nodes := int $values.trainer.multiNode.nodes -}}
{{- if and (gt $nodes 1) (not $values.storage.runs.existingClaim) (ne $values.storage.runs.accessMode "ReadWriteMany") -}}
{{- fail (printf "trainer.multiNode.nodes is %d, so that all of them need the runs' directory: set storage.runs.accessMode to ReadWriteMany, or name a claim that has it in storage.runs.existingClaim" $nodes) -}}
{{- end -}}
{{- if and (gt $nodes 1) (include "headrace.oneNodeHasModels" .) -}}
{{- fail (printf "trainer.multiNode.nodes is %d, so that all of them need the models: set storage.models.accessMode to ReadWriteMany, or name a claim that has it in storage.models.existingClaim" $nodes) -}}
{{- end -}}
{{- if and (not $values.redis.bundled) (not $values.redis.external.host) -}}
{{- fail "redis.bundled is false: say where your Redis is in redis.external.host" -}}
{{- end -}}
{{- if and (not $values.redis.bundled) (not $values.secrets.existingSecret) -}}
{{- fail "redis.bundled is false: its passwords are yours, so name a Secret that holds them in secrets.existingSecret" -}}
{{- end -}}
{{- if and $values.ingress.enabled (not $values.ingress.hosts) -}}
{{- fail "ingress.enabled is true: name at least one host in ingress.hosts" -}}
{{- end -}}
{{- range $name := list "generator" "rewarder" -}}
{{- $scaling := (index $values $name).autoscaling -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail (printf "%s.autoscaling.minReplicas is %d, above maxReplicas, which is %d" $name (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- $modules := $values.rewarder.rewardModules -}}
{{- if and $modules.configMap $modules.existingClaim -}}
{{- fail "rewarder.rewardModules has both a configMap and an existingClaim: name one" -}}
{{- end -}}
{{- $args := $values.generator.engineArgs -}}
{{- $used := mul (int (default 1 (get $args "tensor_parallel_size"))) (int (default 1 (get $args "pipeline_parallel_size"))) (int (default 1 (get $args "data_parallel_size"))) -}}
{{- if and (not $cpu) (ne (int $used) (int $values.generator.gpus)) -}}
{{- fail (printf "generator.gpus is %d, but generator.engineArgs makes vLLM use %d: the product of tensor_parallel_size, pipeline_parallel_size and data_parallel_size must be generator.gpus" (int $values.generator.gpus) (int $used)) -}}
{{- end -}}
{{- range $name := list "trainer" "generator" "rewarder" -}}
{{- $resources := (index $values $name).resources -}}
{{- range $resource, $_ := merge (dict) (default dict $resources.limits) (default dict $resources.requests) -}}
{{- if or (eq $resource $values.gpuResourceName) (eq $resource $values.nccl.rdma.resourceName) -}}
{{- fail (printf "%s.resources names %s: GPUs are counted in %s.gpus, RDMA devices in nccl.rdma.count" $name $resource $name) -}}
{{- end -}}
{{- end -}}
{{- range $variable, $_ := (index $values $name).env -}}
{{- if has $variable (list "HEADRACE_API_KEY" "HEADRACE_INTERNAL_KEY" "HEADRACE_REDIS_PASSWORD" "HEADRACE_REDIS_URL") -}}
{{- fail (printf "%s.env.%s would be in the pod's description for all to read: put it into a Secret and name that in secrets.existingSecret" $name $variable) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
