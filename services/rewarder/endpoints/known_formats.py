"""All wire formats, by name."""

from services.rewarder.endpoints.headrace_format import HeadraceFormat
from services.rewarder.endpoints.openai_judge_format import OpenAIJudgeFormat
from services.rewarder.endpoints.openrlhf_format import OpenRlhfFormat
from services.rewarder.endpoints.spec import WireFormatName
from services.rewarder.endpoints.trl_format import TrlFormat
from services.rewarder.endpoints.wire_formats import WireFormat

FORMATS: dict[WireFormatName, WireFormat] = {
    "headrace": HeadraceFormat(),
    "trl": TrlFormat(),
    "openrlhf": OpenRlhfFormat(),
    "openai_judge": OpenAIJudgeFormat(),
}
