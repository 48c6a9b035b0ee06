"""The format of conversations without a tokenizer: as many token ids as the text of the messages would have."""

import msgspec

from services.generator.rollouts import SampledCompletion
from services.generator.simulated.draws import prompt_ids_of
from services.generator.simulated.model_facts import ModelFacts
from shared.turns import ChatMessage, TurnRequest


class SimulatedChatFormat:
    """Implements turns.chat_format.ChatFormat. No simulated completion calls a tool."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts

    def appended_ids(self, request: TurnRequest) -> list[int]:
        """Return the ids of the messages that are not recorded, and of the tools before the first of them."""
        follow = request.messages[request.num_recorded_messages :]
        tools = [] if request.num_recorded_messages else request.tools
        return prompt_ids_of(msgspec.json.encode([*tools, *follow]).decode(), self._facts)

    def message(self, request: TurnRequest, completion: SampledCompletion) -> ChatMessage:
        """Return the invented text as an assistant message."""
        return {"role": "assistant", "content": completion.text}
