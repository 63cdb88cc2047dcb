// How a run trains, by its steps: supervised training has no policy, and so no reward, versions and engines.

export const isSupervised = (rows) => rows.length > 0 && rows[0].policy_version === undefined;
