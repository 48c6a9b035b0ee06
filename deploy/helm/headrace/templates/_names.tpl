{{- define "headrace.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 40 characters, so that pod names with all their suffixes stay below 63. */}}
{{- define "headrace.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "headrace.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "headrace.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Selector labels. Takes a dict of root and component. */}}
{{- define "headrace.selector" -}}
app.kubernetes.io/name: {{ include "headrace.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/part-of: headrace
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "headrace.meta" -}}
name: {{ printf "%s-%s" (include "headrace.fullname" .root) (default .component .name) }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "headrace.labels" . | nindent 2 }}
{{- end -}}

{{/* Metadata of a StatefulSet or Deployment, with labels and annotations from values. Takes a dict of root, component and of. */}}
{{- define "headrace.workloadMeta" -}}
{{ include "headrace.meta" . }}
{{- with .of.labels }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Image name. Takes a dict of root and component: generator, rewarder, sessions or trainer. */}}
{{- define "headrace.image" -}}
{{- $images := .root.Values.images -}}
{{- $image := index $images .component -}}
{{- $name := $image.repository -}}
{{- if $images.registry -}}{{- $name = printf "%s/%s" (trimSuffix "/" $images.registry) $name -}}{{- end -}}
{{- $tag := default .root.Chart.AppVersion $images.tag -}}
{{- $runsOnCpu := or (eq .component "sessions") (and (eq .component "rewarder") (eq (int .root.Values.rewarder.gpus) 0)) -}}
{{- if or $runsOnCpu (eq $images.flavour "cpu") -}}{{- $tag = printf "%s-cpu" $tag -}}{{- end -}}
{{- if $image.digest -}}{{- printf "%s@%s" $name $image.digest -}}{{- else -}}{{- printf "%s:%s" $name $tag -}}{{- end -}}
{{- end -}}

{{- define "headrace.secretName" -}}
{{- default (printf "%s-keys" (include "headrace.fullname" .)) .Values.secrets.existingSecret -}}
{{- end -}}

{{/* http or https, for the services' HTTP ports. Takes the root. */}}
{{- define "headrace.scheme" -}}
{{- ternary "https" "http" (ne .Values.tls.secretName "") -}}
{{- end -}}

{{- define "headrace.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "headrace.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* DNS name of a pod of a StatefulSet. Takes a dict of root, component, service and ordinal. */}}
{{- define "headrace.podHost" -}}
{{- $full := include "headrace.fullname" .root -}}
{{- printf "%s-%s-%v.%s-%s.%s.svc.%s" $full .component .ordinal $full .service .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end -}}

{{- define "headrace.rendezvous" -}}
{{- $host := include "headrace.podHost" (dict "root" . "component" "trainer" "service" "trainer-nodes" "ordinal" 0) -}}
{{- printf "%s:%v" $host .Values.trainer.multiNode.rendezvousPort -}}
{{- end -}}
