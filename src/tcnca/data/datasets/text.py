"""Text of Long-Range Arena: is a film review, read byte by byte, negative or positive?"""

from functools import partial

from tcnca.data.datasets.definition import Entry
from tcnca.data.sources import imdb
from tcnca.data.tasks import ClassificationTask

TEXT = Entry(
    name="text",
    title="Text (Long-Range Arena)",
    about="tell negative from positive film reviews (IMDB), at most 4000 bytes",
    source="ai.stanford.edu, 84 MB",
    sizes={"train": 25_000, "test": 25_000},
    disk=66_000_000,
    task=partial(ClassificationTask, max_length=4000),
    read=imdb.read,
    forms="aclImdb_v1.tar.gz, its folder, or a folder with imdb_train.tsv and imdb_test.tsv, plain or packed",
    downloads=imdb.DOWNLOADS,
)
