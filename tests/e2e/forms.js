// Forms as people meet them: found on the page, filled with values they did not have, read again.
window.fairlaneForms = (() => {
  const path = (form, here = location.pathname) =>
    `${form.method} ${new URL(form.getAttribute("action") || here, location).pathname}`;
  const fields = (form) => [...form.elements].filter((each) => each.name && each.type !== "hidden" && !each.disabled
    && ["input", "select", "textarea"].includes(each.localName));
  const all = (page = document) => [...page.forms].filter((form) => fields(form).length);
  const find = (form) => all().find((each) => path(each) === form);
  const isTick = (element) => ["checkbox", "radio"].includes(element.type);
  const names = (form) => [...new Set(fields(form).map((each) => each.name))];

  // Forms are known by method and address: "post /tenants/new/".
  async function list(address) {
    const answer = await fetch(address);
    const here = new URL(answer.url).pathname;
    return all(new DOMParser().parseFromString(await answer.text(), "text/html")).map((form) => path(form, here));
  }

  function read(which) {
    const form = find(which);
    return Object.fromEntries(names(form).map((name) => {
      const same = fields(form).filter((each) => each.name === name);
      return [name, isTick(same[0]) ? same.filter((each) => each.checked).map((each) => each.value) : [same[0].value]];
    }));
  }

  function set(element, value) {
    element.value = value;
    element.dispatchEvent(new Event("input", { bubbles: true }));
    element.dispatchEvent(new Event("change", { bubbles: true }));
  }

  // The next place of a scale is another one, and inside its limits.
  function number(element) {
    const [low, high] = [element.min, element.max].map((limit) => (limit === "" ? null : Number(limit)));
    const shown = Number(element.value || element.placeholder) || low || 0;
    const step = element.step === "any" ? 0.25 : 1;
    return String(high !== null && shown + step > high ? shown - step : shown + step);
  }

  function tick(same) {
    if (same[0].type === "radio") {
      same[(same.findIndex((each) => each.checked) + 1) % same.length].checked = true;
    } else {
      const others = same.filter((each) => !each.checked);
      if (same.length > 1 && !others.length) others.push(same[0]);
      same.forEach((each) => { each.checked = others.includes(each); });
    }
    same[0].dispatchEvent(new Event("change", { bubbles: true }));
  }

  // Every field gets another value: the one given for its name, or what its kind allows. Returns what is in it then.
  function fill(which, given) {
    const form = find(which);
    for (const name of names(form)) {
      const same = fields(form).filter((each) => each.name === name);
      const [element] = same;
      if (name in given) {
        if (isTick(element)) same.forEach((each) => { each.checked = given[name].includes(each.value); });
        else set(element, given[name]);
      } else if (isTick(element)) tick(same);
      else if (element.localName === "select") {
        const others = [...element.options].filter((each) => !each.selected);
        if (others.length) set(element, (others.find((each) => each.value) || others[0]).value);
      } else if (element.type === "number") set(element, number(element));
      else set(element, `${name} "'><img src=x onerror=probed()>{{7*7}} שלום`.slice(0, element.maxLength > 0 ? element.maxLength : 1000));
    }
    return read(which);
  }

  function submit(which) {
    const form = find(which);
    const wrong = fields(form).filter((each) => !each.checkValidity()).map((each) => `${each.name}: ${each.validationMessage}`);
    if (!wrong.length) form.requestSubmit(form.querySelector("button"));
    return wrong;
  }

  // What a form refused, and a button; not the alarms that stand on pages.
  const refusals = () => [...document.querySelectorAll(".field .error, .errors[role=alert], p.error, .message.error[role=status]")]
    .map((each) => `${each.closest(".field")?.querySelector("[name]")?.name || ""}: ${each.innerText.trim()}`);

  return { list, read, fill, submit, refusals };
})();
