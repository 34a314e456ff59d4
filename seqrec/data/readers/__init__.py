"""Readers of the sources' formats; each reads its files, block by block, into the two canonical tables.

A reader gets files by role (`interactions`, `items`) and returns `Tables` of `CheckedRows`: good rows with canonical
column names, and bad rows with file, line and reason. Memory is bounded by the size of a block, except for items.
"""

from seqrec.data.readers.amazon import amazon_2014, amazon_2018, amazon_2018_ratings, amazon_2023
from seqrec.data.readers.blocks import DamagedFileError
from seqrec.data.readers.csv_files import own_files
from seqrec.data.readers.movielens import movielens_1m, movielens_10m, movielens_100k, movielens_latest, recbole_100k
from seqrec.data.readers.reviews import gowalla, steam, yelp
from seqrec.data.readers.row_checks import CheckedRows, Reader, Tables
from seqrec.data.readers.sequences_of_items import growing_prefixes, lines_of_items
