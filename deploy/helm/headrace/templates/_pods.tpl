{{/* Settings of every pod. Takes a dict of root, component and of, which is the workload's values. */}}
{{- define "headrace.podSettings" -}}
serviceAccountName: {{ include "headrace.serviceAccount" .root }}
automountServiceAccountToken: false
# Service links would set variables with the same names as ours, such as HEADRACE_PORT=tcp://10.0.0.1:8000.
enableServiceLinks: false
hostNetwork: false
hostIPC: {{ default false .of.hostIPC }}
hostPID: false
# The pause process reaps ended processes. Otherwise our services would be process 1 and have to reap orphans.
shareProcessNamespace: true
securityContext:
  {{- $default := dict "seccompProfile" (include "headrace.seccomp" . | fromYaml) }}
  {{- mergeOverwrite $default (deepCopy .root.Values.podSecurityContext) (deepCopy (default dict .of.podSecurityContext)) | toYaml | nindent 2 }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .of.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .of.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "headrace.seccomp" -}}
{{- $profile := dict "type" "RuntimeDefault" -}}
{{- if eq .component "rewarder" -}}
{{- $profile = dict "type" .of.sandbox.seccompProfile.type -}}
{{- with .of.sandbox.seccompProfile.localhostProfile -}}{{- $_ := set $profile "localhostProfile" . -}}{{- end -}}
{{- end -}}
{{- toYaml $profile -}}
{{- end -}}

{{- define "headrace.containerSecurity" -}}
{{- mergeOverwrite (deepCopy .root.Values.containerSecurityContext) (deepCopy (default dict .of.containerSecurityContext)) | toYaml -}}
{{- end -}}

{{/* Size of the pod's own shared memory; empty if it uses the node's. Takes the values of a workload. */}}
{{- define "headrace.ownShm" -}}
{{- if and .shmSize (not .hostIPC) -}}{{- .shmSize -}}{{- end -}}
{{- end -}}

{{/* Source of a volume: a claim, or a directory that is deleted with the pod. Takes a dict of root, name and claim, which is its values. */}}
{{- define "headrace.keptOrNot" -}}
{{- if .claim.emptyDir -}}
emptyDir: {sizeLimit: {{ .claim.size }}}
{{- else -}}
persistentVolumeClaim: {claimName: {{ default (printf "%s-%s" (include "headrace.fullname" .root) .name) .claim.existingClaim }}}
{{- end -}}
{{- end -}}

{{/* The replicas of a workload that can have an autoscaler. Takes a dict of root, component, of and kind. */}}
{{- define "headrace.replicas" -}}
{{- $name := printf "%s-%s" (include "headrace.fullname" .root) .component -}}
{{- include "headrace.replicasBeside" (dict "of" .of "live" (lookup "apps/v1" .kind .root.Release.Namespace $name)) -}}
{{- end -}}

{{/* With an autoscaler, the replicas that run, because Kubernetes sets 1 if a number disappears from the manifest. None if there are none,
or if Helm only renders: the autoscaler then raises them to its minimum. Takes a dict of of and live, which is the object in the cluster. */}}
{{- define "headrace.replicasBeside" -}}
{{- if not .of.autoscaling.enabled -}}
replicas: {{ .of.replicas }}
{{- else -}}
{{- $replicas := int (dig "spec" "replicas" 0 .live) -}}
{{- if gt $replicas 0 -}}
replicas: {{ $replicas }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Spreads pods of one kind over nodes if possible, unless values say otherwise. */}}
{{- define "headrace.spread" -}}
{{- $selector := include "headrace.selector" . | fromYaml -}}
{{- $default := list (dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway") -}}
{{- $all := list -}}
{{- range (default $default .of.topologySpreadConstraints) -}}
{{- $all = append $all (mergeOverwrite (dict "labelSelector" (dict "matchLabels" $selector)) .) -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{/* Resources with GPUs and, if wanted, RDMA devices. Takes a dict of root, of and gpus. */}}
{{- define "headrace.resources" -}}
{{- $resources := deepCopy .of.resources -}}
{{- $devices := dict -}}
{{- if gt (int .gpus) 0 -}}
{{- $_ := set $devices .root.Values.gpuResourceName (int .gpus) -}}
{{- if and .rdma .root.Values.nccl.rdma.enabled -}}
{{- $_ := set $devices .root.Values.nccl.rdma.resourceName (int .root.Values.nccl.rdma.count) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $resources "limits" (mergeOverwrite (default dict $resources.limits) $devices) -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Volumes of all services: keys and writable directories. Takes a dict of root, component and of. */}}
{{- define "headrace.volumes" -}}
{{- $values := .root.Values -}}
- name: keys
  secret:
    secretName: {{ include "headrace.secretName" .root }}
    defaultMode: 0440
    items:
      - {key: api-key, path: api-key}
      {{- if ne .component "rewarder" }}
      - {key: internal-key, path: internal-key}
      {{- end }}
      {{- if ne .component "trainer-node" }}
      - {key: redis-password-{{ .component }}, path: redis-password-{{ .component }}}
      {{- end }}
- name: tmp
  emptyDir: {sizeLimit: {{ $values.storage.tmpSize }}}
{{- if not .of.cache.persistent }}
- name: cache
  emptyDir: {sizeLimit: {{ .of.cache.size }}}
{{- end }}
{{- if and (not $values.redis.bundled) $values.redis.external.tls.enabled $values.redis.external.tls.caConfigMap (ne .component "trainer-node") }}
- name: redis-ca
  configMap: {name: {{ $values.redis.external.tls.caConfigMap }}}
{{- end }}
{{- if and $values.secrets.apiKeysSecret (ne .component "trainer-node") }}
- name: api-keys
  secret:
    secretName: {{ $values.secrets.apiKeysSecret }}
    defaultMode: 0440
    items: [{key: api-keys, path: api-keys}]
{{- end }}
{{- with include "headrace.tlsVolume" . }}
{{ . }}
{{- end }}
{{- if include "headrace.hasHubToken" . }}
- name: hub
  secret:
    secretName: {{ $values.hub.tokenSecret }}
    defaultMode: 0440
    items: [{key: token, path: token}]
{{- end }}
{{- if include "headrace.hasCode" . }}
- name: code
  persistentVolumeClaim: {claimName: {{ default (printf "%s-code" (include "headrace.fullname" .root)) $values.storage.code.existingClaim }}}
{{- end }}
{{- with include "headrace.ownShm" .of }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ . }}}
{{- end }}
{{- with .of.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Not empty for components with the hub's token. Sessions load no model. Takes a dict of root and component. */}}
{{- define "headrace.hasHubToken" -}}
{{- $loadsNone := or (eq .component "sessions") (and (eq .component "rewarder") (eq (int .root.Values.rewarder.gpus) 0)) -}}
{{- if not $loadsNone -}}{{- .root.Values.hub.tokenSecret -}}{{- end -}}
{{- end -}}

{{/* The certificate, its key and its CA; only the CA for components without an HTTP server. Takes a dict of root and component. */}}
{{- define "headrace.tlsVolume" -}}
{{- with .root.Values.tls.secretName -}}
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items:
      {{- if has $.component (list "trainer" "generator" "rewarder" "sessions") }}
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
      {{- end }}
      - {key: ca.crt, path: ca.crt}
{{- end -}}
{{- end -}}

{{/* A claim for each pod of a StatefulSet, if its cache is persistent. Takes a dict of of. */}}
{{- define "headrace.cacheClaims" -}}
{{- with .of.cache -}}
{{- if .persistent -}}
persistentVolumeClaimRetentionPolicy: {whenDeleted: Retain, whenScaled: Delete}
volumeClaimTemplates:
  - metadata:
      name: cache
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .storageClassName }}
      storageClassName: {{ . }}
      {{- end }}
      resources: {requests: {storage: {{ .size }}}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "headrace.mounts" -}}
{{- $values := .root.Values -}}
- {name: keys, mountPath: /run/secrets/headrace, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
{{- if and (not $values.redis.bundled) $values.redis.external.tls.enabled $values.redis.external.tls.caConfigMap (ne .component "trainer-node") }}
- {name: redis-ca, mountPath: /etc/headrace/redis-ca, readOnly: true}
{{- end }}
{{- if and $values.secrets.apiKeysSecret (ne .component "trainer-node") }}
- {name: api-keys, mountPath: /run/secrets/headrace-api-keys, readOnly: true}
{{- end }}
{{- if $values.tls.secretName }}
- {name: tls, mountPath: /run/secrets/headrace-tls, readOnly: true}
{{- end }}
{{- if include "headrace.hasHubToken" . }}
- {name: hub, mountPath: /run/secrets/headrace-hub, readOnly: true}
{{- end }}
{{- if include "headrace.hasCode" . }}
- {name: code, mountPath: /code{{ if ne .component "trainer" }}, readOnly: true{{ end }}}
{{- end }}
{{- if include "headrace.ownShm" .of }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- with .of.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Claims that trainer and generators share. */}}
{{- define "headrace.sharedVolumes" -}}
{{- $full := include "headrace.fullname" .root -}}
{{- range $name := list "models" "uploads" "weights" }}
{{- $claim := index $.root.Values.storage $name }}
{{- if $claim.enabled }}
- name: {{ $name }}
  persistentVolumeClaim: {claimName: {{ default (printf "%s-%s" $full $name) $claim.existingClaim }}{{ if eq (get $claim "accessMode") "ReadOnlyMany" }}, readOnly: true{{ end }}}
{{- end }}
{{- end }}
{{- with .root.Values.storage.objectStore.existingSecret }}
- name: object-store
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{- define "headrace.sharedMounts" -}}
{{- if .root.Values.storage.models.enabled }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .root.Values.storage.uploads.enabled }}
- {name: uploads, mountPath: /uploads{{ if ne .component "trainer" }}, readOnly: true{{ end }}}
{{- end }}
{{- if .root.Values.storage.weights.enabled }}
- {name: weights, mountPath: /weights}
{{- end }}
{{- if .root.Values.storage.objectStore.existingSecret }}
- {name: object-store, mountPath: /run/secrets/headrace-store, readOnly: true}
{{- end }}
{{- end -}}

{{/* Whether `helm test` can make its tiny model in the models claim. */}}
{{- define "headrace.testMakesModel" -}}
{{- with .Values.storage.models -}}
{{- if and .enabled (ne .accessMode "ReadOnlyMany") -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* A probe that sends a request to the service from inside its container, with the mounted key. */}}
{{- define "headrace.probe" -}}
exec:
  command: [python3, -m, shared.health_check{{ range . }}, {{ . }}{{ end }}]
timeoutSeconds: 5
{{- end -}}

{{/* A probe for a process without an HTTP server, whose loop touches a file. Takes the longest time between two touches, in seconds. */}}
{{- define "headrace.heartbeat" -}}
exec:
  command:
    - python3
    - -c
    - import os, sys, time; sys.exit(time.time() - os.stat("/tmp/heartbeat").st_mtime > {{ . }})
timeoutSeconds: 5
{{- end -}}

{{/* Labels of pods. They contain no version, so that an upgrade does not restart pods only because of a label. */}}
{{- define "headrace.podLabels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/part-of: headrace
{{- if hasPrefix "trainer" .component }}
headrace.io/ranks: "true"
{{- end }}
{{- with .of.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}
