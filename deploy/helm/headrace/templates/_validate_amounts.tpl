{{/* A quantity of Kubernetes as a number: 8Gi is 8589934592, 500m is 0.5. */}}
{{- define "headrace.amount" -}}
{{- $text := toString . -}}
{{- $unit := regexFind "[a-zA-Z]+$" $text -}}
{{- $factors := dict "m" 0.001 "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- range $power, $prefix := list "" "K" "M" "G" "T" "P" "E" -}}
{{- $factor := 1 -}}
{{- range until $power -}}{{- $factor = mul $factor 1024 -}}{{- end -}}
{{- $_ := set $factors (printf "%si" $prefix) $factor -}}
{{- end -}}
{{- mulf (float64 (trimSuffix $unit $text)) (get $factors $unit) -}}
{{- end -}}

{{/* Problems with amounts that Kubernetes would refuse, or with which a container would run out of memory. */}}
{{- define "headrace.problems.amounts" -}}
{{- $values := .Values -}}
{{- range $name := list "trainer" "generator" "rewarder" "sessions" "redis" }}
{{- $of := index $values $name }}
{{- $limits := default dict $of.resources.limits }}
{{- $requests := default dict $of.resources.requests }}
{{- range $resource, $limit := $limits }}
{{- $request := get $requests $resource }}
{{- if and (hasKey $requests $resource) (gt (include "headrace.amount" $request | float64) (include "headrace.amount" $limit | float64)) }}
{{ printf "%s.resources.requests.%s is %v, above %s.resources.limits.%s, which is %v: lower the request or raise the limit" $name $resource $request $name $resource $limit }}
{{- end }}
{{- end }}
{{- $memory := get $limits "memory" }}
{{- if and $of.shmSize $memory }}
{{- if gt (include "headrace.amount" $of.shmSize | float64) (include "headrace.amount" $memory | float64) }}
{{ printf "%s.shmSize is %v, but it is a part of %s.resources.limits.memory, which is only %v: lower shmSize or raise the limit" $name $of.shmSize $name $memory }}
{{- end }}
{{- end }}
{{- if ne $name "redis" }}
{{- range $resource, $_ := merge (dict) $limits $requests }}
{{- if or (eq $resource $values.gpuResourceName) (eq $resource $values.nccl.rdma.resourceName) }}
{{ printf "%s.resources names %s: GPUs are counted in %s.gpus, RDMA devices in nccl.rdma.count" $name $resource $name }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if $values.redis.bundled }}
{{- include "headrace.problems.redisAmounts" $values.redis }}
{{- end }}
{{- end -}}

{{/* Problems with Redis's memory and disk: a rewrite of the append-only file copies memory, and the file is nearly as large as memory. Takes the values of redis. */}}
{{- define "headrace.problems.redisAmounts" -}}
{{- /* In Redis, gb means Gi and g means G. */}}
{{- $maxmemory := .maxmemory | upper | replace "KB" "Ki" | replace "MB" "Mi" | replace "GB" "Gi" | replace "K" "k" | replace "ki" "Ki" }}
{{- $bytes := include "headrace.amount" $maxmemory | float64 }}
{{- $limit := get (default dict .resources.limits) "memory" }}
{{- if $limit }}
{{- if gt $bytes (mulf 0.85 (include "headrace.amount" $limit | float64)) }}
{{ printf "redis.maxmemory is %s, above 85%% of redis.resources.limits.memory, which is %v, so Redis would be killed before it refuses a write: set redis.maxmemory to about half of the limit, because a rewrite of the append-only file copies memory, or raise the limit" .maxmemory $limit }}
{{- end }}
{{- end }}
{{- $size := .persistence.size }}
{{- if and (not .persistence.existingClaim) (lt (include "headrace.amount" $size | float64) $bytes) }}
{{ printf "redis.persistence.size is %v, below redis.maxmemory, which is %s: set it to several times redis.maxmemory, because there are two append-only files during a rewrite" $size .maxmemory }}
{{- end }}
{{- end -}}
