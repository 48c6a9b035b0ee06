"""All wire formats, by name."""

from services.rewarder.endpoints.spec import WireFormatName
from services.rewarder.endpoints.wire_formats.headrace_format import HeadraceFormat
from services.rewarder.endpoints.wire_formats.openai_judge_format import OpenAIJudgeFormat
from services.rewarder.endpoints.wire_formats.openrlhf_format import OpenRlhfFormat
from services.rewarder.endpoints.wire_formats.trl_format import TrlFormat
from services.rewarder.endpoints.wire_formats.wire_format import WireFormat

FORMATS: dict[WireFormatName, WireFormat] = {
    "headrace": HeadraceFormat(),
    "trl": TrlFormat(),
    "openrlhf": OpenRlhfFormat(),
    "openai_judge": OpenAIJudgeFormat(),
}
