"""Datasets that yield batches spread over replicas.

A *source* yields batches of host arrays: `from_arrays`, `from_random_access`, Grain,
any iterable or generator function (`as_source` lists them). A `DistributedDataset`
divides each batch among the replicas of a strategy. It keeps the position after the
batches that were used, so a checkpoint can save it. See `docs/data/index.md`.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.data._dataset import DistributedDataset as DistributedDataset
from armillary.data._iterator import DistributedIterator as DistributedIterator
from armillary.data._iterator import OptionalBatch as OptionalBatch
from armillary.data._layout import InputContext as InputContext
from armillary.data._layout import InputOptions as InputOptions
from armillary.data.sources._arrays import ArrayDataset as ArrayDataset
from armillary.data.sources._arrays import from_arrays as from_arrays
from armillary.data.sources._features import FixedLenFeature as FixedLenFeature
from armillary.data.sources._libraries import HuggingFaceDataset as HuggingFaceDataset
from armillary.data.sources._libraries import as_source as as_source
from armillary.data.sources._libraries import from_huggingface as from_huggingface
from armillary.data.sources._mix import MixedDataset as MixedDataset
from armillary.data.sources._mix import mix as mix
from armillary.data.sources._pack import PackedExamples as PackedExamples
from armillary.data.sources._pack import pack as pack
from armillary.data.sources._random_access import (
    RandomAccessDataset as RandomAccessDataset,
)
from armillary.data.sources._random_access import (
    from_random_access as from_random_access,
)
from armillary.data.sources._select import SelectedExamples as SelectedExamples
from armillary.data.sources._select import select as select
from armillary.data.sources._source import Source as Source
from armillary.data.sources._source import SourceIterator as SourceIterator
from armillary.data.sources._tfrecord import TFRecordDataset as TFRecordDataset
from armillary.data.sources._tfrecord import from_tfrecords as from_tfrecords

_mark_public(globals())
