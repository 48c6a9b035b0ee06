{{/* Not empty for components that exchange weights. Takes a dict of component. */}}
{{- define "headrace.hasWeights" -}}
{{- if not (has .component (list "rewarder" "sessions")) -}}true{{- end -}}
{{- end -}}

{{/* Variables of all services. Like the others in this file, it takes a dict of root, component and of. */}}
{{- define "headrace.commonEnv" -}}
- {name: HOME, value: /cache}
{{- if not (hasKey .of.env "HF_HOME") }}
- {name: HF_HOME, value: /cache/huggingface}
{{- end }}
- {name: HEADRACE_HOST, value: 0.0.0.0}
- {name: HEADRACE_PORT, value: "8000"}
- {name: HEADRACE_METRICS_PORT, value: {{ .root.Values.metrics.port | quote }}}
{{- if not (hasKey .of.env "HEADRACE_LOG_LEVEL") }}
- {name: HEADRACE_LOG_LEVEL, value: {{ .root.Values.logLevel | quote }}}
{{- end }}
- {name: HEADRACE_LOG_FORMAT, value: {{ .root.Values.logFormat }}}
- {name: HEADRACE_API_KEY_FILE, value: /run/secrets/headrace/api-key}
{{- if ne .component "rewarder" }}
- {name: HEADRACE_INTERNAL_KEY_FILE, value: /run/secrets/headrace/internal-key}
{{- end }}
{{- if and .root.Values.secrets.apiKeysSecret (ne .component "trainer-node") }}
- {name: HEADRACE_API_KEYS_FILE, value: /run/secrets/headrace-api-keys/api-keys}
{{- end }}
{{- if .root.Values.tls.secretName }}
{{- if ne .component "trainer-node" }}
- {name: HEADRACE_TLS_CERT_FILE, value: /run/secrets/headrace-tls/tls.crt}
- {name: HEADRACE_TLS_KEY_FILE, value: /run/secrets/headrace-tls/tls.key}
{{- end }}
- {name: HEADRACE_TLS_CA_FILE, value: /run/secrets/headrace-tls/ca.crt}
{{- end }}
{{- if not (hasKey .of.env "HEADRACE_DATA_ROOTS") }}
- {name: HEADRACE_DATA_ROOTS, value: "/models{{ if .root.Values.storage.uploads.enabled }}:/uploads{{ end }}"}
{{- end }}
{{- if and (include "headrace.hasWeights" .) (not (hasKey .of.env "HEADRACE_WEIGHT_ROOTS")) }}
{{- $store := .root.Values.storage.objectStore }}
- {name: HEADRACE_WEIGHT_ROOTS, value: "/weights{{ if or $store.existingSecret $store.env }}:s3://:gs://:gcs://:az://:abfs://{{ end }}"}
{{- end }}
- name: HEADRACE_REPLICA_ID
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{/* The address of Redis, with the service's user name. */}}
{{- define "headrace.redisEnv" -}}
{{- $redis := .root.Values.redis -}}
{{- $url := "" -}}
{{- if $redis.bundled -}}
{{- $url = printf "redis://%s@%s-redis:6379/0" .component (include "headrace.fullname" .root) -}}
{{- else -}}
{{- $out := $redis.external -}}
{{- $user := index $out.users .component -}}
{{- $scheme := ternary "rediss" "redis" $out.tls.enabled -}}
{{- $url = printf "%s://%s%s:%v/%v" $scheme (ternary (printf "%s@" $user) "" (ne $user "")) $out.host $out.port $out.database -}}
{{- if and $out.tls.enabled $out.tls.caConfigMap -}}
{{- $url = printf "%s?ssl_ca_certs=/etc/headrace/redis-ca/ca.crt" $url -}}
{{- end -}}
{{- end -}}
- {name: HEADRACE_REDIS_URL, value: {{ $url | quote }}}
- {name: HEADRACE_REDIS_PASSWORD_FILE, value: /run/secrets/headrace/redis-password-{{ .component }}}
- {name: HEADRACE_REDIS_PATIENCE_S, value: {{ .of.redisPatienceSeconds | quote }}}
{{- end -}}

{{/* Variables of trainer and generators, which use NCCL and exchange weights. */}}
{{- define "headrace.gpuEnv" -}}
{{- $values := .root.Values -}}
{{- $component := .component -}}
{{- with $values.nccl.socketInterface }}
- {name: NCCL_SOCKET_IFNAME, value: {{ . | quote }}}
{{- if ne $component "generator" }}
- {name: GLOO_SOCKET_IFNAME, value: {{ . | quote }}}
{{- end }}
{{- end }}
- {name: NCCL_DEBUG, value: {{ $values.nccl.debug | quote }}}
{{- if not $values.nccl.rdma.enabled }}
- {name: NCCL_IB_DISABLE, value: "1"}
{{- end }}
{{- end -}}

{{- define "headrace.hubEnv" -}}
{{- if not .root.Values.hub.enabled }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- if include "headrace.hasHubToken" . }}
- {name: HF_TOKEN_PATH, value: /run/secrets/headrace-hub/token}
{{- end }}
{{- end -}}

{{/* If the nvidia runtime is the node's default, an image could otherwise get all GPUs by its own variables. */}}
{{- define "headrace.noGpuEnv" -}}
- {name: NVIDIA_VISIBLE_DEVICES, value: void}
{{- end -}}

{{/* Not empty for components that mount the code of clients. Takes a dict of root and component. */}}
{{- define "headrace.hasCode" -}}
{{- if and .root.Values.storage.code.enabled (has .component (list "trainer" "rewarder" "sessions")) -}}true{{- end -}}
{{- end -}}

{{/* Directories of Python modules, as in PATH; empty for the image's own. Takes a dict of root, component, modules, mountPath and inImage. */}}
{{- define "headrace.modulePath" -}}
{{- $path := list -}}
{{- if or .modules.configMap .modules.existingClaim -}}{{- $path = append $path .mountPath -}}{{- end -}}
{{- if include "headrace.hasCode" . -}}{{- $path = append ($path | default (list .inImage)) "/code" -}}{{- end -}}
{{- join ":" $path -}}
{{- end -}}

{{- define "headrace.env.trainer" -}}
{{- include "headrace.commonEnv" . }}
{{- include "headrace.redisEnv" . | nindent 0 }}
- {name: HEADRACE_RUNS_DIR, value: /runs}
{{- if .root.Values.storage.uploads.enabled }}
- {name: HEADRACE_UPLOADS_DIR, value: /uploads}
{{- end }}
{{- if include "headrace.hasCode" . }}
- {name: HEADRACE_CODE_UPLOADS_DIR, value: /code}
{{- end }}
- {name: HEADRACE_REWARDER_URL, value: "{{ include "headrace.scheme" .root }}://{{ include "headrace.fullname" .root }}-rewarder:8000"}
- {name: HEADRACE_SESSIONS_URL, value: "{{ include "headrace.scheme" .root }}://{{ include "headrace.fullname" .root }}-sessions:8000"}
- {name: HEADRACE_PUSH_ADDRESS, value: $(POD_IP)}
{{- include "headrace.rankEnv" . | nindent 0 }}
{{- if gt (int .of.multiNode.nodes) 1 }}
# The pod's IP address and not its name: a DNS cache may still map the name to the previous pod.
- {name: HEADRACE_RENDEZVOUS_ENDPOINT, value: "$(POD_IP):{{ .of.multiNode.rendezvousPort }}"}
{{- end }}
{{- include "headrace.gpuEnv" . | nindent 0 }}
{{- include "headrace.hubEnv" . | nindent 0 }}
{{- end -}}

{{- define "headrace.env.trainer-node" -}}
{{- include "headrace.commonEnv" . }}
- {name: HEADRACE_RUNS_DIR, value: /runs}
{{- include "headrace.rankEnv" . | nindent 0 }}
- {name: HEADRACE_RENDEZVOUS_ENDPOINT, value: {{ include "headrace.rendezvous" .root | quote }}}
{{- include "headrace.gpuEnv" . | nindent 0 }}
{{- include "headrace.hubEnv" . | nindent 0 }}
{{- end -}}

{{- define "headrace.rankEnv" -}}
- {name: HEADRACE_RANK_STOP_GRACE_S, value: {{ .of.rankStopGraceSeconds | quote }}}
- {name: HEADRACE_COLLECTIVE_TIMEOUT_S, value: {{ .of.multiNode.collectiveTimeoutSeconds | quote }}}
{{- end -}}

{{- define "headrace.env.generator" -}}
{{- $service := printf "%s-generators.%s.svc.%s" (include "headrace.fullname" .root) .root.Release.Namespace .root.Values.clusterDomain -}}
{{- include "headrace.commonEnv" . }}
{{- include "headrace.redisEnv" . | nindent 0 }}
# The replica's name in the headless service, which exists before it is ready: its first weight push comes earlier.
- {name: HEADRACE_ADVERTISE_URL, value: "{{ include "headrace.scheme" .root }}://$(HEADRACE_REPLICA_ID).{{ $service }}:8000"}
- {name: HEADRACE_ENGINE_ARGS, value: {{ toJson .of.engineArgs | quote }}}
- {name: HEADRACE_ENGINE_START_TIMEOUT_S, value: {{ .of.engineStartTimeoutSeconds | quote }}}
{{- include "headrace.gpuEnv" . | nindent 0 }}
{{- include "headrace.hubEnv" . | nindent 0 }}
{{- end -}}

{{- define "headrace.env.rewarder" -}}
{{- include "headrace.commonEnv" . }}
{{- include "headrace.redisEnv" . | nindent 0 }}
- {name: HEADRACE_NUM_REWARD_WORKERS, value: {{ .of.workers | quote }}}
- {name: HEADRACE_DRAIN_S, value: {{ .of.drainSeconds | quote }}}
{{- with include "headrace.modulePath" (dict "root" .root "component" .component "modules" .of.rewardModules "mountPath" "/etc/headrace/rewards" "inImage" "/rewards") }}
- {name: HEADRACE_REWARD_PATH, value: {{ . | quote }}}
{{- end }}
- {name: HEADRACE_REWARD_ALLOWED_HOSTS, value: {{ .of.endpoints.allowedHosts | quote }}}
- {name: HEADRACE_REWARD_ALLOWED_NETWORKS, value: {{ .of.endpoints.allowedNetworks | quote }}}
- {name: HEADRACE_REWARD_ALLOWED_PORTS, value: {{ .of.endpoints.allowedPorts | quote }}}
{{- if .of.endpoints.secretsSecret }}
- {name: HEADRACE_REWARD_SECRETS_DIR, value: /run/secrets/headrace-endpoints}
{{- end }}
{{- if .of.endpoints.caConfigMap }}
- {name: HEADRACE_REWARD_CA_FILE, value: /etc/headrace/endpoint-ca/ca.crt}
{{- end }}
{{- include "headrace.hubEnv" . | nindent 0 }}
{{- if eq (int .of.gpus) 0 }}
{{- include "headrace.noGpuEnv" . | nindent 0 }}
{{- end }}
{{- end -}}

{{- define "headrace.env.sessions" -}}
{{- include "headrace.commonEnv" . }}
{{- include "headrace.redisEnv" . | nindent 0 }}
- {name: HEADRACE_NUM_TOOL_WORKERS, value: {{ .of.workers | quote }}}
{{- if and .root.Values.tls.secretName (not (hasKey .of.env "HEADRACE_ADVERTISE_URL")) }}
# For agent functions, which run in this pod: no certificate names the pod.
- {name: HEADRACE_ADVERTISE_URL, value: "https://127.0.0.1:8000"}
{{- end }}
{{- with include "headrace.modulePath" (dict "root" .root "component" .component "modules" .of.toolModules "mountPath" "/etc/headrace/tools" "inImage" "/tools") }}
- {name: HEADRACE_TOOL_PATH, value: {{ . | quote }}}
{{- end }}
{{- include "headrace.noGpuEnv" . | nindent 0 }}
{{- end -}}

{{/* Maps of variables in the values, by the key of each map. Takes a dict of root, component and of. */}}
{{- define "headrace.givenEnv" -}}
{{- $given := dict -}}
{{- if include "headrace.hasWeights" . -}}
{{- $_ := set $given "nccl.env" .root.Values.nccl.env -}}
{{- $_ := set $given "storage.objectStore.env" .root.Values.storage.objectStore.env -}}
{{- end -}}
{{- $_ := set $given (printf "%s.env" (trimSuffix "-node" .component)) .of.env -}}
{{- toJson $given -}}
{{- end -}}

{{/* All variables of a service; _validate_env.tpl refuses duplicates. Takes a dict of root, component and of. */}}
{{- define "headrace.env" -}}
{{- include (printf "headrace.env.%s" .component) . }}
{{- range $given := include "headrace.givenEnv" . | fromJson }}
{{- range $name, $value := $given }}
{{- if kindIs "map" $value }}
- {name: {{ $name }}, valueFrom: {{ toJson $value.valueFrom }}}
{{- else }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
