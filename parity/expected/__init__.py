"""Which values the judge accepts: exact ones, or intervals that follow from the formula."""
