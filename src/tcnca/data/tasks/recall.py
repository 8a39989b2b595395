"""Associative recall: which value followed this key?"""

from tcnca.data.generators.recall import Recall
from tcnca.data.kinds import RecallTask
from tcnca.data.tasks.definition import Entry

LENGTHS = (64, 1024, 4096, 8192)
VOCABULARIES = (10, 20)


def recall(length: int = LENGTHS[0], vocabulary: int = VOCABULARIES[0]) -> Entry:
    """The set of a length and a vocabulary."""
    generator = Recall(length=length, vocabulary=vocabulary)
    sizes = {"train": 5_000, "validation": 500, "test": 500}
    return Entry(
        name=f"recall-{length}-{vocabulary}",
        title=f"Associative recall, length {length}, vocabulary {vocabulary}",
        about="name the value that followed a key",
        source="made here",
        sizes=sizes,
        disk=sum(sizes.values()) * (length + 9),
        task=RecallTask,
        facts={"symbols": list(generator.symbols), "classes": list(generator.symbols)},
        generator=generator,
    )
