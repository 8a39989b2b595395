"""Associative recall: which value followed this key?"""

from tcnca.data.datasets.definition import Entry
from tcnca.data.generators.recall import Recall
from tcnca.data.tasks import RecallTask

LENGTHS = (64, 1024, 4096, 8192)
VOCABULARIES = (10, 20)


def recall(length: int = LENGTHS[0], vocab_size: int = VOCABULARIES[0]) -> Entry:
    """The set of a length and a vocabulary."""
    generator = Recall(length=length, vocab_size=vocab_size)
    sizes = {"train": 5_000, "validation": 500, "test": 500}
    return Entry(
        name=f"recall-{length}-{vocab_size}",
        title=f"Associative recall, length {length}, vocab_size {vocab_size}",
        about="name the value that followed a key",
        source="made here",
        sizes=sizes,
        disk=sum(sizes.values()) * (length + 9),
        task=RecallTask,
        facts={"symbols": list(generator.symbols), "class_names": list(generator.symbols)},
        generator=generator,
    )
