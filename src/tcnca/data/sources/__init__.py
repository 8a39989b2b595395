"""The published data sets: where they are to be had, and readers for every form that people keep them in."""

from tcnca.data.sources import aan, acl_citations, cifar10, enwik8, imdb
from tcnca.data.sources.published import Download

__all__ = ["Download", "aan", "acl_citations", "cifar10", "enwik8", "imdb"]
