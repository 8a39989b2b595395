"""Image of Long-Range Arena: the class of a gray CIFAR-10 picture, read pixel by pixel."""

from tcnca.data.datasets.definition import Entry
from tcnca.data.sources import cifar10
from tcnca.data.tasks import ClassificationTask

IMAGE = Entry(
    name="image",
    title="Image (Long-Range Arena)",
    about="name what a gray 32×32 picture shows (CIFAR-10), 1024 pixels in a row",
    source="cs.toronto.edu, 170 MB",
    sizes={"train": 45_000, "validation": 5_000, "test": 10_000},
    disk=62_000_000,
    task=ClassificationTask,
    facts={"mean": 0.48, "deviation": 0.24},
    read=cifar10.read,
    forms="cifar-10-python.tar.gz or cifar-10-binary.tar.gz, their folders, or an .npz",
    downloads=cifar10.DOWNLOADS,
)
