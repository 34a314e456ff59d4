"""Architectures in pure torch: this package imports torch and itself."""

from seqrec.models.base import Batch, Catalogue, SequenceModel
from seqrec.models.bert4rec import BERT4Rec
from seqrec.models.bsarec import BSARec
from seqrec.models.caser import Caser
from seqrec.models.esasrec import ESASRec
from seqrec.models.fdsa import FDSA
from seqrec.models.flash4rec import FLASH4Rec
from seqrec.models.fpmc import FPMC
from seqrec.models.gru4rec import GRU4Rec
from seqrec.models.hstu import HSTU
from seqrec.models.lrurec import LRURec
from seqrec.models.mfbpr import MFBPR
from seqrec.models.rec_denoiser import RecDenoiser
from seqrec.models.recformer import Recformer
from seqrec.models.recguru import RecGURU
from seqrec.models.s3rec import S3Rec
from seqrec.models.sasrec import SASRec
from seqrec.models.ssept import SSEPT
from seqrec.models.strec import STRec
from seqrec.models.tisasrec import TiSASRec
from seqrec.models.unisrec import UniSRec
from seqrec.models.zesrec import ZESRec

REGISTRY: dict[str, type[SequenceModel]] = {
    "sasrec": SASRec,
    "esasrec": ESASRec,
    "flash4rec": FLASH4Rec,
    "hstu": HSTU,
    "bsarec": BSARec,
    "lrurec": LRURec,
    "strec": STRec,
    "gru4rec": GRU4Rec,
    "bert4rec": BERT4Rec,
    "caser": Caser,
    "fpmc": FPMC,
    "mfbpr": MFBPR,
    "tisasrec": TiSASRec,
    "ssept": SSEPT,
    "rec_denoiser": RecDenoiser,
    "recformer": Recformer,
    "zesrec": ZESRec,
    "unisrec": UniSRec,
    "fdsa": FDSA,
    "s3rec": S3Rec,
    "recguru": RecGURU,
}

__all__ = ["REGISTRY", "Batch", "Catalogue", "SequenceModel"]
